"""What starts a server again that has died: the files in deploy/ and docker/."""

from __future__ import annotations

import argparse
import configparser
import shlex
from pathlib import Path

import pytest
import yaml
from support.migraphx import CHECKOUT

from rocserve.flags import add_serve_flags, settings_from
from rocserve.settings import ServerSettings


def settings_of(words: list[str]) -> ServerSettings:
    """The settings of `rocserve serve` with these words."""
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    at = words.index("serve")
    return settings_from(parser.parse_args(words[at + 1 :]))


def test_systemd_starts_it_again_and_waits_for_its_end() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(CHECKOUT / "deploy/systemd/rocserve.service")
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    settings = settings_of(shlex.split(service["ExecStart"]))
    assert float(service["TimeoutStopSec"]) > settings.drain_seconds + settings.exit_timeout_seconds
    # The server sends what these wait for.
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert float(service["WatchdogSec"]) > 0
    # Otherwise the end of a worker that the kernel kills would be the server's.
    assert service["OOMPolicy"] == "continue"


@pytest.mark.parametrize("file", sorted(CHECKOUT.glob("docker/compose*.yaml")), ids=lambda file: file.stem)
def test_compose_starts_it_again(file: Path) -> None:
    services = yaml.safe_load(file.read_text())["services"]
    servers = {name: one for name, one in services.items() if "rocserve" in one["image"]}
    assert servers
    assert {one.get("restart") for one in servers.values()} == {"unless-stopped"}
