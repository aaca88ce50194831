"""A real Prometheus that scrapes servers, with the rules of deploy/."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml

from benchmarks.server_process import free_port
from support.waiting import wait_until


def program(name: str) -> str:
    """prometheus or promtool; without it the test skips."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: apt-get install prometheus")
    return found


class Prometheus:
    """A context manager. It scrapes and evaluates each second."""

    def __init__(self, targets: Mapping[str, Mapping[str, str]], rules: Mapping[str, Any], folder: Path) -> None:
        """`targets`: an address -> the labels that the Prometheus Operator gives; `rules`: the spec of a
        PrometheusRule; `folder`: empty, for its files."""
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "rocserve",
                    "static_configs": [
                        {"targets": [target], "labels": dict(labels)} for target, labels in targets.items()
                    ],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))

    def __enter__(self) -> Self:
        command = [
            program("prometheus"),
            f"--config.file={self._folder}/prometheus.yaml",
            f"--storage.tsdb.path={self._folder}/data",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_ready, f"Prometheus; {self._folder}/prometheus.log says why")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that there are now, without those that are no number."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/query?{words}", timeout=10) as answer:
            series = json.load(answer)["data"]["result"]
        return [each for each in series if each["value"][1] != "NaN"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
