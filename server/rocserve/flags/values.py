"""The values of flags: from text to what the settings hold."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocserve.core.remote_places import RemotePlace
from rocserve.repository.remote.urls import parse_remote
from rocserve.settings import (
    DEFAULT_MAX_BATCH_SIZE,
    AdminAddresses,
    RateLimitResource,
    ReadinessRule,
    RestrictedProtocols,
)

RESTRICTED_PROTOCOLS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)


def boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "on"):
        return True
    if text.lower() in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got '{text}'")


def readiness_rule(text: str) -> ReadinessRule:
    if text.lower() == ReadinessRule.ALWAYS.value:
        return ReadinessRule.ALWAYS
    try:
        return ReadinessRule.KEPT if boolean(text) else ReadinessRule.STARTED
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected true, false or always, got '{text}'") from None


def repository(text: str) -> Path | RemotePlace:
    if "://" not in text:
        return Path(text)
    try:
        return parse_remote(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def file(text: str) -> Path | None:
    """None for no text, as charts write what is left out."""
    return Path(text) if text else None


def folder(text: str) -> str:
    """Absolute, as workers and their children are told of it."""
    return str(Path(text).expanduser().absolute())


def at_least(minimum: float, kind: Callable[[str], Any], most: int | None = None) -> Callable[[str], Any]:
    """A parser of numbers from `minimum` on, for argparse; `most`: None = without an end."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None
        # Also of what is no number, such as "nan", which is not less than anything.
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum:g}, got '{text}'")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got '{text}'")
        return value

    return parse


_SIZE = re.compile(r"([0-9]+)([KMGT]?)", re.IGNORECASE)


def byte_size(text: str) -> int:
    """A number of bytes, or of KiB, MiB, GiB or TiB: 512M, 16G."""
    found = _SIZE.fullmatch(text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 512M or 16G, got '{text}'")
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


LARGEST_INT32 = (1 << 31) - 1
"""What gRPC's core can hold."""

PORT = at_least(0, int, most=65535)
COUNT = at_least(0, int, most=LARGEST_INT32)
POSITIVE = at_least(1, int)
MESSAGE_BYTES = at_least(1, int, most=LARGEST_INT32)
RATE = at_least(0, float, most=LARGEST_INT32)
SECONDS = at_least(0, float)
POSITIVE_SECONDS = at_least(0.001, float)
MILLISECONDS = at_least(0, int, most=LARGEST_INT32)
POSITIVE_MILLISECONDS = at_least(1, int, most=LARGEST_INT32)


def setting(text: str) -> tuple[str, str]:
    """`name=value`."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"expected SETTING=VALUE, got '{text}'")
    return name, value


def scoped_setting(text: str) -> tuple[str, str, str]:
    """`scope,name=value`, or `name=value` for the scope ""."""
    first, separator, rest = text.partition(",")
    if separator and "=" not in first:
        return (first, *setting(rest))
    return ("", *setting(text))


def setting_of(form: str) -> Callable[[str], tuple[str, str, str]]:
    """A parser of `scope,name=value`, without which it makes no sense. `form`: what the error shows."""

    def parse(text: str) -> tuple[str, str, str]:
        scope, _, rest = text.partition(",")
        name, equals, value = rest.partition("=")
        if "=" in scope or not (scope and name and equals):
            raise argparse.ArgumentTypeError(f"expected {form}, got '{text}'")
        return scope, name, value

    return parse


def part_of(scope: str, name: str) -> Callable[[str], tuple[str, str, str]]:
    """A parser of the value of one scoped setting."""
    return lambda text: (scope, name, text)


def backend_setting(text: str) -> tuple[str, str, str]:
    """As `scoped_setting`; `,name=value` is for all backends too."""
    backend, name, value = scoped_setting(text)
    if name == DEFAULT_MAX_BATCH_SIZE and not value.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number for {name}, got '{value}'")
    return backend, name, value


def rate_limit_resource(text: str) -> RateLimitResource:
    """`name:count` or `name:count:device`."""
    name, *numbers = text.split(":")
    if not name or len(numbers) not in (1, 2) or not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, got '{text}'")
    return RateLimitResource(name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def regular_expression(text: str) -> str:
    """Checked here; whoever uses it compiles it."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got '{text}': {error}") from None
    return text


def origins(text: str) -> tuple[str, ...]:
    """Of web pages, as browsers write them."""
    found = tuple(text.split(","))
    for origin in found:
        if origin != "*" and not re.fullmatch(r"https?://[a-z0-9.:\[\]-]+", origin):
            raise argparse.ArgumentTypeError(
                f"expected origins such as https://app.example.com or http://localhost:3000, or *, got '{origin}'"
            )
    return found


def admin_addresses(text: str) -> AdminAddresses:
    """`any`, `none`, or a list of `local`, addresses and networks."""
    if text in ("any", "none"):
        return AdminAddresses(anybody=text == "any")
    parts = [part.strip() for part in text.split(",")]
    try:
        networks = tuple(ipaddress.ip_network(part) for part in parts if part != "local")
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected any, none, or a list of local, addresses and networks, got '{text}': {error}"
        ) from None
    return AdminAddresses(local="local" in parts, networks=networks)


def restricted_protocols(text: str) -> RestrictedProtocols:
    """`protocol,protocol:header=value`; or `header@file=path` or `header@env=name`, where the value is to be found. No
    header's name has an `@`, and no value means anything but itself."""
    names, separator, header = text.partition(":")
    protocols = tuple(name.strip() for name in names.split(","))
    place, equals, value = header.partition("=")
    key, at, source = place.partition("@")
    if not separator or not equals or not key or not all(protocols) or (at and source not in ("file", "env")):
        # Not the text itself, which may hold a secret.
        raise argparse.ArgumentTypeError(
            "expected PROTOCOL[,PROTOCOL...]:HEADER=VALUE, HEADER@file=PATH or HEADER@env=NAME in place of HEADER=VALUE"
        )
    unknown = [name for name in protocols if name not in RESTRICTED_PROTOCOLS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown restricted protocol '{unknown[0]}', expected one of {', '.join(RESTRICTED_PROTOCOLS)}"
        )
    if source == "file":
        return RestrictedProtocols(protocols, key, file=Path(value))
    if source == "env":
        name, value = value, os.environ.get(value, "")
        if not value:
            raise argparse.ArgumentTypeError(f"the environment variable '{name}' is not there, or empty")
    return RestrictedProtocols(protocols, key, value)


def worker_variables(text: str) -> tuple[tuple[str, str], ...]:
    """`name,name` for all models, or `model:name,name` for one; as pairs of model ("" = all) and name."""
    model, separator, names = text.rpartition(":")
    pairs = tuple((model, name) for name in names.split(","))
    if (separator and not model) or not all(name and "=" not in name for _, name in pairs):
        raise argparse.ArgumentTypeError(f"expected [MODEL:]NAME[,NAME...], got '{text}'")
    return pairs
