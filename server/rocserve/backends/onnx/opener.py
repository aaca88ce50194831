"""Opens ONNX Runtime sessions on the chosen execution providers, and checks that the providers run the model.

The check is needed because ONNX Runtime drops a provider that does not start, and writes the reason only to standard
error.

Parameters of a model, under the names of Triton's ONNX Runtime backend if it has them:

| parameter | meaning | default |
|---|---|---|
| intra_op_thread_count | threads within one operator, shared by all instances; 0 = default | CPUs - instances + 1 |
| inter_op_thread_count | operators in parallel; above 1 switches to parallel execution; 0 = default | 1 |
| execution_mode | 0 sequential, 1 parallel | 0 |
| graph_optimization_level | disable, basic, extended, layout, all | by `optimization.graph.level`, else all |
| enable_mem_arena, enable_mem_pattern | 0 or 1 | 1 |
| session.* | a session configuration entry of ONNX Runtime, by its own name | |
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.contained_paths import path_within
from rocserve.backends.file_kinds import what_it_is
from rocserve.backends.migraphx.installation import remedy_if_missing
from rocserve.backends.onnx.external_weights import NO_WEIGHTS, ExternalWeights, stable_weights
from rocserve.backends.onnx.model_file import FATAL_ONLY, WEIGHTS_FOLDER, ModelFile, left_out, open_served
from rocserve.backends.onnx.provider_options import MIGRAPHX_PROVIDER, plugin_options
from rocserve.backends.onnx.providers import ProviderPlan
from rocserve.backends.output_capture import OutputCapture
from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, usable_cpus
from rocserve.cache.temporary_folder import temporary_folder
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.printable import without_colours
from rocserve.jobs.runner import TEMPORARY_PREFIX

_LOG = logging.getLogger(__name__)


def session_options(config: ModelConfig, instance_count: int) -> Any:
    """Make the onnxruntime.SessionOptions. Raises ServeError (INVALID_ARGUMENT) for a wrong parameter."""
    options = onnxruntime.SessionOptions()
    options.logid = config.name
    # Errors are raised with the same text. If they were logged as well, any client could fill the log.
    options.log_severity_level = FATAL_ONLY
    # All instances share the threads, apart from each caller's own: concurrent runs together use as many threads as
    # there are CPUs.
    options.intra_op_num_threads = read_integer(config, "intra_op_thread_count", 0, 0, MOST_THREADS) or max(
        1, usable_cpus() - instance_count + 1
    )
    options.inter_op_num_threads = read_integer(config, "inter_op_thread_count", 0, 0, MOST_THREADS) or 1
    parallel = "1" if options.inter_op_num_threads > 1 else "0"
    if read_choice(config, "execution_mode", parallel, ("0", "1")) == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    # `optimization.graph.level` means these levels, as in Triton's ONNX Runtime backend.
    default_level = {-1: "basic", 1: "extended", 2: "disable"}.get(config.graph_level, "all")
    levels = {
        "disable": "ORT_DISABLE_ALL",
        "basic": "ORT_ENABLE_BASIC",
        "extended": "ORT_ENABLE_EXTENDED",
        "layout": "ORT_ENABLE_LAYOUT",
        "all": "ORT_ENABLE_ALL",
    }
    level = read_choice(config, "graph_optimization_level", default_level, tuple(levels))
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, levels[level])
    options.enable_cpu_mem_arena = read_choice(config, "enable_mem_arena", "1", ("0", "1")) == "1"
    options.enable_mem_pattern = read_choice(config, "enable_mem_pattern", "1", ("0", "1")) == "1"
    # Threads spin during a run, which makes runs about a tenth faster, but not between runs, when they would take CPU
    # time from the server.
    entries = {"session.force_spinning_stop": "1"}
    entries |= {name: value for name, value in config.parameters.items() if name.startswith("session.")}
    for name, value in entries.items():
        try:
            options.add_session_config_entry(name, value)
        except Exception as error:
            raise invalid_argument(f"parameter '{name}' of model '{config.name}': {error}") from None
    return options


def error_lines(written: str) -> list[str]:
    """Return the errors among ONNX Runtime's log lines, without colours, times and source positions."""
    errors: list[str] = []
    is_error = False
    for line in without_colours(written).splitlines():
        head = re.match(r"^.*?\[(?P<level>[EWIVF]):onnxruntime:[^\]]*\] *", line)
        if head is not None:
            is_error = head["level"] in "EF"
            line = line[head.end() :]
        line = without_source_position(line)
        if is_error and line:
            errors.append(line)
    return errors


def remedy(text: str) -> str:
    """Return a remedy for a refusal; "" = none is known."""
    if found := re.search(r"official support for domain (\S+) is till opset (\d+)", text):
        domain, newest = found.groups()
        which = "" if domain == "ai.onnx" else f" of {domain}"
        return f"; this ONNX Runtime reads opset <= {newest}{which}: export again with opset_version={newest}"
    if found := re.search(r"Unsupported model IR version: \d+, max supported IR version: (\d+)", text):
        return (
            f"; this ONNX Runtime reads IR version <= {found[1]}: export again with an older onnx package, or set"
            f" ir_version = {found[1]} in the model"
        )
    if found := re.search(r"Failed to construct locale with name:((\w+)\.([\w-]+))", text):
        name, language, encoding = found.groups()
        return (
            f"; this machine lacks the locale {name}, which the model's StringNormalizer needs: apt-get install locales"
            f" && localedef --inputfile={language} --charmap={encoding} {name} (Fedora: dnf install"
            f" glibc-langpack-{language.partition('_')[0]})"
        )
    return ""


def without_source_position(text: str) -> str:
    """Remove the source position that a message of ONNX Runtime may begin with."""
    position = r"^\S*/\S+\.(?:cc|h|cpp|hpp):\d+ .*?(?=\[ERROR\]|\[ONNXRuntimeError\]|$)"
    return re.sub(position, "", text, count=1).removeprefix("[ERROR]").strip()


class SessionOpener:
    """Opens the sessions of one model. A provider that does not take the model is never replaced silently."""

    def __init__(self, model: ModelSource, plan: ProviderPlan, weights: ExternalWeights = NO_WEIGHTS) -> None:
        self._model = model
        self._plan = plan
        self.file = ModelFile(model.model_file)
        """The plan of the sessions; may change with the first session."""
        self._is_first = True
        # A GPU gets its own copy of the weights anyway.
        self._weights = NO_WEIGHTS if plan.on_gpu else weights

    def open(self, dimensions: Mapping[str, int] | None = None) -> Any:
        """Open an onnxruntime.InferenceSession, with sizes for named dimensions. Raises ServeError (INVALID_ARGUMENT)
        if a parameter is wrong or ONNX Runtime cannot load the file, ServeError (UNAVAILABLE) if a provider did not
        start, or a GPU's provider runs none of the operators."""
        # In a shared process other models run at the same time, so each session gets one thread by default.
        model = self._model
        options = self._options(usable_cpus() if model.shares_process else model.instance_count)
        for name, size in (dimensions or {}).items():
            options.add_free_dimension_override_by_name(name, size)
        if not self._plan.providers:
            return self._open_on_cpu(options)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for provider in self._plan.providers:
            os.environ.update(provider.variables)
        session, failure = None, ""
        with OutputCapture().captured() as errors, self._temporary_files():
            try:
                providers: list[tuple[str, dict[str, str]]] | None = []
                for provider in self._plan.providers:
                    if provider.devices:
                        given = plugin_options(provider.kind, provider.options)
                        options.add_provider_for_devices(list(provider.devices), dict(given))
                        providers = None
                    elif providers is not None:
                        providers.append((provider.kind.provider, dict(provider.options)))
                session = self._session(options, providers)
            except Exception as error:
                # The binding's exceptions have no common base class but Exception.
                failure = without_source_position(str(error))
        written = errors.text
        if session is None:
            # This call raises if the model itself is at fault.
            self.open_for_signature()
            reasons = [failure, *(line for line in error_lines(written) if line not in failure)]
            name = self._model.model_file.name
            lacks = remedy_if_missing(failure)
            raise unavailable(f"ONNX Runtime cannot run {name} on {self._names}: {'; '.join(reasons)}{lacks}")
        started = session.get_providers()
        for provider in self._plan.providers:
            if provider.name not in started:
                no_reason = f"it gave no reason; check that all libraries of {provider.kind.package} are installed"
                why = "; ".join(error_lines(written)) or no_reason
                raise unavailable(f"ONNX Runtime's {provider.kind.provider} did not start: {why}")
        # The providers' output on standard error goes to the log.
        os.write(2, written.encode())
        self._check_assignment(session)
        return session

    def open_for_signature(self) -> Any:
        """Open a session quickly, only to read inputs and outputs. Raises ServeError (INVALID_ARGUMENT) like `open`."""
        options = self._options(1)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return self._open_on_cpu(options)

    def open_exposing(self, tensors: Sequence[str]) -> Any:
        """Open a session on the CPU that has inner tensors as further outputs. Raises ServeError like `open`."""
        exposing = SessionOpener(self._model, ProviderPlan((), accepts_cpu=True), self._weights)
        exposing.file = self.file.exposing(tensors)
        return exposing._open_on_cpu(exposing._options(1))

    def _open_on_cpu(self, options: Any) -> Any:
        try:
            return self._session(options, [])
        except ServeError:
            raise
        except MemoryError:
            raise unavailable(f"not enough memory for {self._model.model_file.name}") from None
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            file, text = self._model.model_file, without_source_position(str(error))
            hint = remedy(text) or (what_it_is(file) if "Protobuf parsing failed" in text else "")
            raise invalid_argument(f"ONNX Runtime cannot load {file.name}: {text}{hint}") from None

    @contextmanager
    def _temporary_files(self) -> Iterator[None]:
        """Give MIGraphX a folder for temporary files: after a failed compile, 2.15 and later leave the program there,
        with all weights."""
        if not any(provider.kind is MIGRAPHX_PROVIDER for provider in self._plan.providers):
            yield
            return
        before = os.environ.get("TMPDIR")
        with temporary_folder(TEMPORARY_PREFIX) as folder:
            os.environ["TMPDIR"] = str(folder)
            try:
                yield
            finally:
                os.environ.pop("TMPDIR")
                os.environ.update({} if before is None else {"TMPDIR": before})

    def _session(self, options: Any, providers: Sequence[tuple[str, dict[str, str]]] | None) -> Any:
        """`providers`: None = the plugins in the options; names would replace them."""
        names = None if providers is None else [*providers, "CPUExecutionProvider"]
        with stable_weights(self.file.path, self._weights, options) as path:

            def open_session(file: ModelFile) -> Any:
                if file.content is not None:
                    options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
                model = str(path) if file.content is None else file.content
                return onnxruntime.InferenceSession(model, options, providers=names, enable_fallback=0)

            served, session = open_served(self.file, open_session)
        # Without this, the session would run on the CPU after a GPU's failure.
        session.disable_fallback()
        for output, classes in served.labels.items() if served is not self.file else ():
            what = f"its {len(classes)} classes' values" if classes else "its classes' values"
            _LOG.info(
                "output '%s' is served as the tensor of %s, not as ZipMap's maps%s",
                output,
                what,
                "; its labels are the classes" if classes else "",
            )
        if self._is_first and (missing := left_out(session)):
            _LOG.warning("model '%s': %s", self._model.name, missing)
        self.file, self._is_first = served, False
        return session

    def _options(self, instance_count: int) -> Any:
        """Make the options, with the custom operators. Raises ServeError (INVALID_ARGUMENT) if a parameter is wrong."""
        options = session_options(self._model.config, instance_count)
        folder = self._model.model_folder
        for name in self._model.config.operator_libraries:
            path = path_within(folder, name, (folder,), "custom operator library")
            if not path.is_file():
                raise invalid_argument(f"custom operator library '{name}' is not in the model's folder")
            try:
                options.register_custom_ops_library(str(path))
            except Exception as error:
                # The binding's exceptions have no common base class but Exception.
                text = without_source_position(str(error))
                raise invalid_argument(f"ONNX Runtime cannot load the custom operators of '{name}': {text}") from None
        return options

    def _check_assignment(self, session: Any) -> None:
        """Log operators that do not run on the providers. Raises ServeError (UNAVAILABLE) if none runs on the GPU."""
        # ONNX Runtime before 1.24 does not report the assignment.
        assignment_info = getattr(session, "get_provider_graph_assignment_info", None)
        operators: dict[str, Counter[str]] = {}
        for part in assignment_info() if assignment_info is not None else ():
            operators.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
        elsewhere = operators.pop("CPUExecutionProvider", Counter())
        if not elsewhere:
            return
        what = ", ".join(f"{name} ({times})" for name, times in elsewhere.most_common(8))
        if not operators and self._plan.on_gpu:
            raise unavailable(
                f"{self._names} runs none of the model's operators, so all would run on the CPU: {what}; use KIND_CPU"
            )
        total = elsewhere.total() + sum(counter.total() for counter in operators.values())
        _LOG.warning(
            "model '%s': %s of %s operators run on ONNX Runtime's CPU provider, not on %s: %s",
            self._model.name,
            elsewhere.total(),
            total,
            self._names,
            what,
        )

    @property
    def _names(self) -> str:
        return ", ".join(provider.name for provider in self._plan.providers)


def session_facts(session: Any) -> Mapping[str, str]:
    """Return facts for the model's metadata: ONNX Runtime's version, and the providers in order of precedence."""
    return {
        "onnxruntime_version": onnxruntime.__version__,
        "execution_providers": ", ".join(session.get_providers()),
    }
