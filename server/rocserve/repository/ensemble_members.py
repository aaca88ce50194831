"""Checks whether an ensemble fits the members that are served now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rocserve.config.ensemble_checks import check_ensemble, check_no_cycle
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.model_names import ModelKey
from rocserve.core.serving import ServedModel
from rocserve.scheduling.ensemble.graph import find_member

Served = Mapping[str, ServedModel]


@dataclass(frozen=True, slots=True)
class MemberReview:
    """How an ensemble fits the models that are served now."""

    problem: ServeError | None = None
    """Why the ensemble cannot run; None = it can."""
    is_decoupled: bool = False
    """Whether a member makes the ensemble decoupled."""
    are_loading: bool = False
    """With a problem: whether a member is being loaded."""
    lacks_files: bool = False
    """All members that are missing wait for their files."""

    @property
    def text(self) -> str:
        return "" if self.problem is None else self.problem.text


FITS = MemberReview()
"""The review of a model without members."""


def members_of(config: ModelConfig) -> tuple[ModelKey, ...]:
    """Return the keys of an ensemble's members, each once."""
    return tuple(dict.fromkeys(step.member for step in config.ensemble_steps))


def review(
    key: ModelKey, config: ModelConfig, served: Served, ensembles: Mapping[ModelKey, ModelConfig]
) -> MemberReview:
    """Compare an ensemble with the models served now. `ensembles`: the configurations of all ensembles."""
    found = ((step.member, find_member(step, served)) for step in config.ensemble_steps)
    members = {name: None if member is None else member.config for name, member in found}
    try:
        if None in members.values():
            check_no_cycle(key, ensembles)
            for step in config.ensemble_steps:
                model = served.get(step.member)
                if model is not None and model.versions and find_member(step, served) is None:
                    raise invalid_argument(
                        f"ensemble '{config.name}' depends on '{step.model_name}' whose required version"
                        f" {step.model_version} is not loaded."
                    )
        return MemberReview(is_decoupled=check_ensemble(config, members))
    except ServeError as error:
        return MemberReview(error)


def reachable(keys: Iterable[ModelKey], next_keys: Callable[[ModelKey], Iterable[ModelKey]]) -> Iterator[ModelKey]:
    """Yield the keys, and all keys that `next_keys` leads to, each once."""
    waiting = list(keys)
    seen: set[ModelKey] = set()
    while waiting:
        key = waiting.pop()
        if key not in seen:
            seen.add(key)
            yield key
            waiting += next_keys(key)


def outermost(members: Mapping[ModelKey, Iterable[ModelKey]]) -> tuple[ModelKey, ...]:
    """Return the models that are not members of another one; all models if each is a member (a circle)."""
    inner = {member for one in members.values() for member in one}
    return tuple(key for key in members if key not in inner) or tuple(members)


def innermost_first(members: Mapping[ModelKey, Iterable[ModelKey]]) -> Iterable[ModelKey]:
    """Return all models of the mapping, members before the models that use them. A circle has no such order."""
    found: dict[ModelKey, None] = {}
    begun: set[ModelKey] = set()
    waiting = list(members)
    while waiting:
        key = waiting[-1]
        if key in begun:
            found[waiting.pop()] = None
        else:
            begun.add(key)
            waiting += (member for member in members[key] if member in members and member not in begun)
    return found
