"""One flag of `rocserve serve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.flags import values


class FlagError(Exception):
    """The command line cannot be served; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    target: str
    """The settings' field; what stands before a point leads into a part of them ("grpc.port")."""
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    aliases: tuple[str, ...] = ()
    value: str = ""
    """What stands for the value in the help; empty: what `parse` says."""

    @property
    def shown_value(self) -> str | None:
        """What stands for the value in the help; None where the choices say it."""
        return None if self.choices else self.value or _SHOWN_VALUES[self.parse]


_SHOWN_VALUES: dict[Callable[[str], Any], str] = {
    values.boolean: "true|false",
    values.readiness_rule: "true|false|always",
    Path: "FILE",
    values.file: "FILE",
    values.folder: "DIR",
    values.PORT: "PORT",
    values.COUNT: "N",
    values.MESSAGE_BYTES: "N",
    values.POSITIVE: "N",
    values.SECONDS: "SECONDS",
    values.POSITIVE_SECONDS: "SECONDS",
    values.MILLISECONDS: "MS",
    values.POSITIVE_MILLISECONDS: "MS",
    values.byte_size: "SIZE",
    values.setting: "SETTING=VALUE",
    values.scoped_setting: "SCOPE,SETTING=VALUE",
    values.rate_limit_resource: "NAME:COUNT[:DEVICE]",
    values.worker_variables: "[MODEL:]NAME[,NAME...]",
    values.restricted_protocols: "PROTOCOLS:HEADER=VALUE",
}
