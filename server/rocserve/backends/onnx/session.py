"""Opens ONNX Runtime sessions as a model's parameters say.

| parameter | meaning | default |
|---|---|---|
| intra_op_thread_count | threads within one operator, shared by all instances; 0 = default | `default_thread_count` |
| inter_op_thread_count | operators side by side; above 1 switches to parallel execution; 0 = default | 1 |
| execution_mode | 0 sequential, 1 parallel | 0 |
| graph_optimization_level | disable, basic, extended, layout, all | all |
| enable_mem_arena, enable_mem_pattern | 0 or 1 | 1 |
| session.* | a session configuration entry of ONNX Runtime, by its own name | |

The names are those of Triton's ONNX Runtime backend where it has one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.onnx.native_messages import error_lines, standard_error_kept
from rocserve.backends.onnx.providers import ProviderPlan
from rocserve.backends.parameters import read_choice, read_integer, usable_cpus
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig

_LOG = logging.getLogger(__name__)

_CPU_PROVIDER = "CPUExecutionProvider"
_FATAL_ONLY = 4
_RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_MOST_NAMED = 8
_SESSION_ENTRY_PREFIX = "session."
_DEFAULT_SESSION_ENTRIES = {
    # Threads wait actively during a run, where that makes runs about a tenth faster, and not between runs, where they
    # would take the CPU from the server.
    "session.force_spinning_stop": "1",
}
_OPTIMIZATION_LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}


class SessionOpener:
    """Opens the sessions of one model. What its providers do not take is not left to another in silence."""

    def __init__(self, model: ModelSource, plan: ProviderPlan) -> None:
        """
        Raises:
            ServeError: INVALID_ARGUMENT; the model file is no file.
        """
        path = model.model_file
        if not path.is_file():
            raise invalid_argument(f"{path} does not exist or is no file")
        if path.stat().st_size == 0:
            raise invalid_argument(f"{path} is empty; expected an ONNX model")
        self._model = model
        self._plan = plan

    def open(self, dimensions: Mapping[str, int] | None = None) -> Any:
        """An onnxruntime.InferenceSession.

        Args:
            dimensions: sizes for dimensions that the model gives only names for.

        Raises:
            ServeError: INVALID_ARGUMENT; a parameter is wrong, or ONNX Runtime cannot load the file (in its own words).
                UNAVAILABLE; a provider did not start.
        """
        options = session_options(self._model.config, self._model.instance_count)
        for name, size in (dimensions or {}).items():
            options.add_free_dimension_override_by_name(name, size)
        if not self._plan.providers:
            return self._session(options, [])
        options.add_session_config_entry(_RECORD_ASSIGNMENT, "1")
        providers = [(provider.kind.provider, dict(provider.options)) for provider in self._plan.providers]
        with standard_error_kept() as written:
            try:
                session = self._session(options, providers)
            except ServeError as error:
                raise _with_details(error, error_lines(written())) from None
        self._require_started(session, error_lines(written()))
        return session

    def open_for_signature(self) -> Any:
        """A session that is only asked for its inputs and outputs: as quick to open as can be.

        Raises:
            ServeError: INVALID_ARGUMENT; as `open`.
        """
        options = session_options(self._model.config, 1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return self._session(options, [])

    def _session(self, options: Any, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
        path = self._model.model_file
        try:
            session = onnxruntime.InferenceSession(
                str(path), options, providers=[*providers, _CPU_PROVIDER], enable_fallback=0
            )
        except Exception as error:
            # The binding's exceptions have no base class of their own.
            raise invalid_argument(f"ONNX Runtime cannot load {path.name}: {error}") from None
        # Nor is it to run on the CPU what fails on a GPU.
        session.disable_fallback()
        return session

    def _require_started(self, session: Any, errors: Sequence[str]) -> None:
        started = session.get_providers()
        for provider in self._plan.providers:
            if provider.kind.provider not in started:
                why = "; ".join(errors) or f"it says no reason; is all there that {provider.kind.package} needs?"
                raise unavailable(f"ONNX Runtime's {provider.kind.provider} did not start: {why}")
        self._tell_assignment(session)

    def _tell_assignment(self, session: Any) -> None:
        """Say in the log what does not run on the providers.

        Raises:
            ServeError: UNAVAILABLE; nothing of the model runs on the GPU.
        """
        operators = _operators(session)
        elsewhere = operators.pop(_CPU_PROVIDER, Counter())
        if not elsewhere:
            return
        names = ", ".join(provider.kind.provider for provider in self._plan.providers)
        what = ", ".join(f"{name} ({times})" for name, times in elsewhere.most_common(_MOST_NAMED))
        if operators or not self._plan.on_gpu:
            total = elsewhere.total() + sum(counter.total() for counter in operators.values())
            _LOG.warning(
                "model '%s': %s of %s operators run on ONNX Runtime's CPU provider, not on %s: %s",
                self._model.name,
                elsewhere.total(),
                total,
                names,
                what,
            )
        else:
            raise unavailable(
                f"{names} takes none of the model's operators, so that all would run on the CPU: {what}; use KIND_CPU"
            )


def _operators(session: Any) -> dict[str, Counter[str]]:
    """How often each provider runs each operator; empty where ONNX Runtime does not tell (before 1.24)."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    operators: dict[str, Counter[str]] = {}
    for part in tell() if tell is not None else ():
        operators.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return operators


def _with_details(error: ServeError, lines: Sequence[str]) -> ServeError:
    more = [line for line in lines if line not in error.text]
    return ServeError(error.code, "; ".join([error.text, *more]))


def session_options(config: ModelConfig, instance_count: int) -> Any:
    """The onnxruntime.SessionOptions.

    Raises:
        ServeError: INVALID_ARGUMENT; a parameter is wrong.
    """
    options = onnxruntime.SessionOptions()
    options.logid = config.name
    # What fails is raised with the same text; logged as well it would let any client fill the log.
    options.log_severity_level = _FATAL_ONLY
    options.intra_op_num_threads = read_integer(config, "intra_op_thread_count", 0, least=0) or default_thread_count(
        instance_count
    )
    options.inter_op_num_threads = read_integer(config, "inter_op_thread_count", 0, least=0) or 1
    parallel = "1" if options.inter_op_num_threads > 1 else "0"
    if read_choice(config, "execution_mode", parallel, ("0", "1")) == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    level = read_choice(config, "graph_optimization_level", "all", tuple(_OPTIMIZATION_LEVELS))
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _OPTIMIZATION_LEVELS[level])
    options.enable_cpu_mem_arena = read_choice(config, "enable_mem_arena", "1", ("0", "1")) == "1"
    options.enable_mem_pattern = read_choice(config, "enable_mem_pattern", "1", ("0", "1")) == "1"
    entries = {name: value for name, value in config.parameters.items() if name.startswith(_SESSION_ENTRY_PREFIX)}
    for name, value in {**_DEFAULT_SESSION_ENTRIES, **entries}.items():
        try:
            options.add_session_config_entry(name, value)
        except Exception as error:
            raise invalid_argument(f"parameter '{name}' of model '{config.name}': {error}") from None
    return options


def default_thread_count(instance_count: int) -> int:
    """Of one operator, its caller's thread included: the instances share the others, so that all that run at once have
    as many threads as there are CPUs."""
    return max(1, usable_cpus() - instance_count + 1)
