"""Which folders are versions of a model, and which of them its version policy serves."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.model_config import ModelConfig, VersionPolicy, VersionPolicyKind

_HIGHEST = 2**63 - 1
_GET_WITH = "get_with"
"""The parameter by which a model that comes without its files names the command that fetches them."""


def is_version_name(name: str) -> bool:
    """Whether a folder of this name holds a version: digits only, no leading zero but "0" itself, at most 63 bits."""
    digits = name.isascii() and name.isdigit() and len(name) <= 19
    return digits and (name == "0" or not name.startswith("0")) and int(name) <= _HIGHEST


def select_versions(policy: VersionPolicy, available: Iterable[int]) -> tuple[int, ...]:
    """The versions that the policy serves, ascending. Specific ones that are not there are left out."""
    existing = sorted(set(available))
    if policy.kind is VersionPolicyKind.ALL:
        return tuple(existing)
    if policy.kind is VersionPolicyKind.SPECIFIC:
        return tuple(version for version in existing if version in policy.specific)
    return tuple(existing[-policy.latest :]) if policy.latest else ()


def no_version_text(config: ModelConfig) -> str:
    """What is said, first in Triton's words, of a model none of whose versions may be served."""
    text = f"at least one version must be available under the version policy of model '{config.name}'"
    command = config.parameters.get(_GET_WITH, "").strip()
    return f"{text}; get one with: {command}" if command else text
