"""Flags of tritonserver that are refused, for their subject is not served, and those that have no effect here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.flags.tls import FlagError
from rocserve.settings.flag import boolean


@dataclass(frozen=True, slots=True)
class UnservedSubject:
    """A part of tritonserver that this version lacks."""

    name: str
    switch: str
    """The flag that switches it; empty where tritonserver has none."""
    flags: tuple[str, ...]


UNSERVED: tuple[UnservedSubject, ...] = (
    UnservedSubject("The Vertex AI front end", "allow-vertex-ai", ("vertex-ai-address", "vertex-ai-port")),
    UnservedSubject("The SageMaker front end", "allow-sagemaker", ("sagemaker-address", "sagemaker-port")),
)

WITHOUT_EFFECT: tuple[str, ...] = (
    "backend-directory",
    "buffer-manager-thread-count",
    "cuda-memory-pool-byte-size",
    "cuda-virtual-address-size",
    "enable-peer-access",
    "grpc-infer-allocation-pool-size",
    "grpc-infer-thread-count",
    "grpc-max-response-pool-size",
    "min-supported-compute-capability",
    "model-load-gpu-limit",
    "model-load-retry-count",
    "pinned-memory-pool-byte-size",
    "repoagent-directory",
)
"""They tune parts of tritonserver that have no counterpart here; charts and scripts give them, so they are taken."""


def refuse_unserved(given: dict[str, Sequence[str]]) -> None:
    """Raises: FlagError: a flag's subject is not served, and it does not switch it off."""
    for subject in UNSERVED:
        if _is_switched_off(subject, given):
            continue
        for name in subject.flags:
            if name in given:
                advice = f", or write --{subject.switch}=false" if subject.switch else ""
                raise FlagError(f"--{name}: {subject.name} is not served by this version; leave the flag out{advice}")


def _is_switched_off(subject: UnservedSubject, given: dict[str, Sequence[str]]) -> bool:
    if subject.switch not in given:
        return False
    value = given[subject.switch][-1]
    try:
        is_on = boolean(value)
    except ValueError as error:
        raise FlagError(f"argument --{subject.switch}: {error}") from None
    if is_on:
        raise FlagError(
            f"--{subject.switch}={value}: {subject.name} is not served by this version;"
            f" leave the flag out or write --{subject.switch}=false"
        )
    return True
