"""Whether an ensemble fits the members that are served now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rocserve.config.ensemble_checks import check_ensemble, check_no_cycle
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import EnsembleStep, ModelConfig
from rocserve.core.serving import ServedModel, ServedVersion

Served = Mapping[str, ServedModel]


def find_member(step: EnsembleStep, served: Served) -> ServedVersion | None:
    """The version that a step would run."""
    model = served.get(step.member)
    if model is None:
        return None
    return model.latest if step.model_version < 0 else model.versions.get(step.model_version)


def members_of(config: ModelConfig) -> tuple[str, ...]:
    """The keys of an ensemble's members, each once."""
    return tuple(dict.fromkeys(step.member for step in config.ensemble_steps))


def review(config: ModelConfig, served: Served, ensembles: Mapping[str, ModelConfig]) -> tuple[ServeError | None, bool]:
    """Why an ensemble cannot run with the models served now, and whether it answers a request any number of times.
    `ensembles`: all of them."""
    found = ((step.member, find_member(step, served)) for step in config.ensemble_steps)
    members = {name: None if member is None else member.config for name, member in found}
    try:
        if None in members.values():
            check_no_cycle(config.name, ensembles)
            for step in config.ensemble_steps:
                model = served.get(step.member)
                if model is not None and model.versions and find_member(step, served) is None:
                    raise invalid_argument(
                        f"ensemble '{config.name}' depends on '{step.model_name}' whose required version"
                        f" {step.model_version} is not loaded."
                    )
        return None, check_ensemble(config, members)
    except ServeError as error:
        return error, False


def outermost(ensembles: Iterable[tuple[str, ModelConfig]]) -> tuple[str, ...]:
    """The ensembles that are no member of another of them; all of them when each is (a circle)."""
    configs = dict(ensembles)
    inner = {member for config in configs.values() for member in members_of(config)}
    return tuple(name for name in configs if name not in inner) or tuple(configs)


def innermost_first(ensembles: Mapping[str, ModelConfig]) -> Iterable[str]:
    """All of them, each behind those that are its members, but in a circle."""
    found: dict[str, None] = {}

    def visit(key: str, above: frozenset[str]) -> None:
        for member in members_of(ensembles[key]):
            if member in ensembles and member not in found and member not in above:
                visit(member, above | {key})
        found[key] = None

    for key in ensembles:
        if key not in found:
            visit(key, frozenset())
    return found
