"""Chooses the execution providers of ONNX Runtime that a model runs on.

The providers that `optimization { execution_accelerators }` names come first. Without any, the instance gets the best
provider of the installed ONNX Runtime: on a GPU MIGraphX's, ROCm's or CUDA's; on the CPU OpenVINO's, else ONNX
Runtime's own. The CPU replaces a GPU only if the parameter `engine` is "auto", and the log says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.compiling.recipe import changes_programs
from rocserve.backends.onnx.external_weights import ExternalWeights
from rocserve.backends.onnx.plugins import Plugin, gpu_devices, migraphx_library, openvino_devices, seen_devices
from rocserve.backends.onnx.provider_options import (
    CUDA,
    MIGRAPHX_PROVIDER,
    OPENVINO,
    ROCM,
    ProviderKind,
    provider_options,
    provider_variables,
    read_options,
)
from rocserve.backends.parameters import read_choice, usable_cpus
from rocserve.cache.digests import file_digest
from rocserve.cache.folders import cache_directory, folder_entries, make_private
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.model_config import ExecutionAccelerator, InstanceKind

_LOG = logging.getLogger(__name__)

KINDS = (MIGRAPHX_PROVIDER, ROCM, CUDA, OPENVINO)
"""The supported providers, preferred first."""


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider with the options for a session."""

    kind: ProviderKind
    options: Mapping[str, str]
    accelerator: Mapping[str, str] = field(default_factory=dict)
    """The accelerator's parameters, including those that the provider does not get."""
    caches_programs: bool = False
    """Whether the provider stores compiled programs in files."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the provider reads when a session is opened."""
    devices: Sequence[Any] = ()
    """The devices of a provider that is a plugin (plugins.py); empty = it is part of ONNX Runtime."""

    @property
    def name(self) -> str:
        """ONNX Runtime's name of the provider in a session."""
        return self.devices[0].ep_name if self.devices else self.kind.provider


@dataclass(frozen=True, slots=True)
class ProviderPlan:
    """Lists the providers of a model's sessions, which take precedence over ONNX Runtime's own CPU provider."""

    providers: tuple[Provider, ...]
    """Empty = only the CPU provider."""
    accepts_cpu: bool
    """Whether the CPU may replace a provider that does not start."""
    is_default: bool = False
    """The configuration names no provider."""

    @property
    def is_replaceable(self) -> bool:
        """Whether the CPU may replace a provider whose answers differ from the CPU's. A GPU is only replaced where the
        CPU is accepted."""
        return self.accepts_cpu or (self.is_default and not self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        return any(provider.kind.on_gpu for provider in self.providers)

    @property
    def compiling(self) -> Provider | None:
        """The provider that compiles each input shape separately; None = no provider does."""
        for provider in self.providers:
            options = provider.options
            on_device = options.get("device_type", "CPU").upper().partition(".")[0] != "CPU"
            is_fixed = on_device or options.get("disable_dynamic_shapes") == "true"
            if provider.kind is MIGRAPHX_PROVIDER or (provider.kind is OPENVINO and is_fixed):
                return provider
        return None


def plan_providers(
    model: ModelSource, available: Sequence[str], plugins: Mapping[str, Plugin] = MappingProxyType({})
) -> ProviderPlan:
    """Choose one instance's providers among the `available` ones and the plugins; a plugin replaces a provider of the
    same name. Parameter `engine`: auto, onnxruntime, cpu (only the CPU's providers). Raises ServeError
    (INVALID_ARGUMENT) for a wrong accelerator, parameter or engine, ServeError (UNAVAILABLE) if a provider is not
    available and `engine` is not auto."""
    engine = read_choice(model.config, "engine", "", ("", "auto", "cpu", "onnxruntime"))
    on_gpu = model.instance_kind is InstanceKind.GPU
    if engine == "cpu" and on_gpu:
        raise invalid_argument(
            f"model '{model.name}' asks for KIND_GPU, but its parameter 'engine' is \"cpu\"; change one of them"
        )
    wanted: list[Provider] = []
    # All accelerators are checked, but only those for the instance's kind are used.
    for accelerators, for_gpu in ((model.config.gpu_accelerators, True), (model.config.cpu_accelerators, False)):
        for accelerator in accelerators:
            provider = _provider(model, _kind(model, accelerator, for_gpu), accelerator)
            if for_gpu is on_gpu:
                wanted.append(provider)
            elif for_gpu:
                _LOG.warning(
                    "model '%s': the execution accelerator '%s' is not used: the instance is on the CPU",
                    model.name,
                    accelerator.name,
                )
    accepts_cpu = engine == "auto"
    is_default = not wanted and engine != "cpu"
    suited = [kind for kind in KINDS if kind.on_gpu is on_gpu] if is_default else [one.kind for one in wanted]
    missing = [kind for kind in suited if kind.provider not in available and kind.provider not in plugins]
    offered = [kind for kind in suited if kind not in missing]
    defaults = (_provider(model, kind, ExecutionAccelerator(kind.accelerator)) for kind in offered)
    found: list[Provider] = []
    faults: list[str] = []
    for provider in defaults if is_default else (one for one in wanted if one.kind in offered):
        plugin = plugins.get(provider.kind.provider)
        try:
            found.append(provider if plugin is None else _on_plugin(model, provider, plugin))
        except RuntimeError as error:
            faults.append(str(error))
        if is_default and found:
            break
    if is_default and (found or not on_gpu):
        for fault in faults:
            _LOG.info("model '%s': %s", model.name, fault)
    elif missing or faults:
        if is_default and faults:
            missing = []  # The user has installed the plugin for this.
        return _without_missing(model, ProviderPlan(tuple(found), accepts_cpu), missing, faults, available)
    if len({bool(provider.devices) for provider in found}) > 1:
        names = ", ".join(provider.name for provider in found)
        raise unavailable(
            f"model '{model.name}': a plugin of ONNX Runtime cannot be combined with a provider that is part"
            f" of it ({names}); name only one of these accelerators"
        )
    return ProviderPlan(tuple(found), accepts_cpu, is_default)


def _on_plugin(model: ModelSource, provider: Provider, plugin: Plugin) -> Provider:
    """Return the provider on the plugin's devices. Raises RuntimeError if it has none."""
    try:
        devices = plugin.devices(migraphx_library(model.settings))
    except RuntimeError as error:
        raise RuntimeError(f"{plugin.package} is installed, but {error}") from None
    wanted = provider.options.get("device_type", "CPU")
    if provider.kind is OPENVINO:
        chosen = openvino_devices(devices, wanted)
    else:
        chosen = gpu_devices(devices, int(provider.options["device_id"]))
    if not chosen:
        what = f" '{wanted}'" if provider.kind is OPENVINO else ""
        raise RuntimeError(
            f"{plugin.package} is installed, but its {plugin.provider} finds no device{what} that it can use"
            f" (ONNX Runtime sees: {seen_devices()})"
        )
    return replace(provider, devices=tuple(chosen))


def _without_missing(
    model: ModelSource,
    plan: ProviderPlan,
    missing: Sequence[ProviderKind],
    faults: Sequence[str],
    available: Sequence[str],
) -> ProviderPlan:
    """Return the plan, of which some providers are missing, with a warning. Raises ServeError (UNAVAILABLE) if the CPU
    is not accepted. `faults`: why plugins cannot be used."""
    reasons = list(faults)
    if missing:
        names = " or ".join(kind.provider for kind in missing)
        packages = " or ".join(kind.package for kind in missing)
        reasons.append(
            f"the installed ONNX Runtime has no {names}, only {', '.join(available)}; the Python package {packages} has"
            " it"
        )
    why = "; ".join(reasons)
    from rocserve.backends.onnx.distributions import installed_onnx_runtimes  # Here: 8 ms of the zygote's start.

    runtimes = installed_onnx_runtimes()
    if problem := runtimes.problem:
        why = f"{why}; {runtimes.names}: {problem}; {runtimes.remedy}"
    if not plan.accepts_cpu:
        remedy = "install that package, use" if missing else "use"
        raise unavailable(
            f"model '{model.name}': {why}; {remedy} KIND_CPU without the accelerator, or set parameter"
            " 'engine' to \"auto\" to accept the CPU"
        )
    on_gpu = model.instance_kind is InstanceKind.GPU
    if model.config.gpu_accelerators if on_gpu else model.config.cpu_accelerators:
        _LOG.warning("model '%s': %s; continuing without it, as parameter 'engine' is \"auto\"", model.name, why)
    else:
        _LOG.warning("model '%s' runs on the CPU, as parameter 'engine' is \"auto\": %s", model.name, why)
    return plan


def _kind(model: ModelSource, accelerator: ExecutionAccelerator, for_gpu: bool) -> ProviderKind:
    name = accelerator.name.lower()
    if name == "tensorrt":
        raise invalid_argument(
            f"model '{model.name}': the execution accelerator 'tensorrt' (NVIDIA) is not supported; use"
            f" {', '.join(kind.accelerator for kind in KINDS if kind.on_gpu)}"
        )
    for kind in KINDS:
        if kind.accelerator == name:
            if kind.on_gpu and not for_gpu:
                raise invalid_argument(
                    f"model '{model.name}': '{name}' is an accelerator for GPUs; name it in gpu_execution_accelerator"
                )
            return kind
    known = ", ".join(kind.accelerator for kind in KINDS)
    raise invalid_argument(
        f"model '{model.name}': the execution accelerator '{accelerator.name}' is unknown; known are {known}"
    )


def _provider(model: ModelSource, kind: ProviderKind, accelerator: ExecutionAccelerator) -> Provider:
    if kind is CUDA:
        # Options that the model's `parameters` may hold, too, as in Triton's ONNX Runtime backend.
        triton_parameters = (
            "cudnn_conv_algo_search",
            "gpu_mem_limit",
            "arena_extend_strategy",
            "do_copy_in_default_stream",
        )
        more = {name: model.config.parameters[name] for name in triton_parameters if name in model.config.parameters}
        accelerator = replace(accelerator, parameters={**more, **accelerator.parameters})
    given = read_options(kind, accelerator, model.name)
    for name in accelerator.parameters:
        if name in kind.ignored:
            _LOG.info("model '%s': parameter '%s' has no effect: %s", model.name, name, kind.ignored[name])
    if kind is MIGRAPHX_PROVIDER:
        options = {**provider_options(given, model.name, model.model_folder), "device_id": "0"}
        return Provider(kind, options, given, caches_programs=True, variables=provider_variables(given))
    if kind is OPENVINO:
        options = {"num_of_threads": str(usable_cpus()), **given}
        options.pop("cache_dir", None)
        return Provider(kind, options, given, caches_programs="cache_dir" in given)
    if kind is ROCM:
        # HIP_VISIBLE_DEVICES leaves the worker only its own GPU.
        return Provider(kind, {**given, "device_id": "0"}, given)
    return Provider(kind, {**given, "device_id": str(model.device or 0)}, given)


def with_caches(model: ModelSource, plan: ProviderPlan, weights: ExternalWeights) -> ProviderPlan:
    """Give each provider that stores compiled programs a folder in the cache, for one model with one set of options,
    because the providers' own file names depend neither on the weights nor on the precision. Sets an environment
    variable for MIGraphX's provider. Raises ServeError (UNAVAILABLE) if the cache cannot be used."""
    if not any(provider.caches_programs for provider in plan.providers):
        return plan
    # They override the provider's option, which older versions of the provider lack.
    provider_variable, plugin_variable = "ORT_MIGRAPHX_MODEL_CACHE_PATH", "ORT_MIGRAPHX_CACHE_DIR"
    # AMD's image for Triton sets a folder for the provider's files; the server keeps it.
    named = os.environ.get(provider_variable, "")
    cache_folder = Path(named) if named else cache_directory(model.settings) / "onnxruntime"
    contents = file_digest(model.model_file, tuple(weights.files.values()))
    switches = {
        name: value
        for name, value in os.environ.items()
        if changes_programs(name.removeprefix("ORT_")) and name not in (provider_variable, plugin_variable)
    }
    providers = list(plan.providers)
    digits = 32
    for number, provider in enumerate(plan.providers):
        if not provider.caches_programs:
            continue
        # Everything that a compiled program depends on and the provider itself does not compare.
        parts = (contents, onnxruntime.__version__, provider.kind.provider, provider.options, switches)
        texts = (part if isinstance(part, str) else repr(sorted(part.items())) for part in parts)
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        folder = cache_folder / f"{provider.kind.accelerator}-{digest[:digits]}"
        try:
            make_private(folder)
            with suppress(OSError):  # In a read-only cache the time of the last use cannot be set.
                os.utime(folder)
        except OSError as error:
            raise unavailable(
                f"cannot use the cache of compiled programs {folder}: {error.strerror or error}; set another folder"
                " with --cache-directory"
            ) from None
        if provider.kind is MIGRAPHX_PROVIDER:
            os.environ[plugin_variable if provider.devices else provider_variable] = str(folder)
        else:
            providers[number] = replace(provider, options={**provider.options, "cache_dir": str(folder)})
    # The least recently used folders are removed until the rest fits; the folder in use, the newest, stays. Only names
    # of this server's form are removed because the operator's folder may hold other files. Errors are ignored because
    # another server may trim the cache at the same time.
    with suppress(OSError):
        own_name = re.compile(f"(?:migraphx|openvino)-[0-9a-f]{{{digits}}}")
        *others, last = folder_entries([entry for entry in cache_folder.iterdir() if own_name.fullmatch(entry.name)])
        total = last.size_bytes + sum(entry.size_bytes for entry in others)
        for entry in others:
            if total > model.settings.cache_bytes:
                shutil.rmtree(entry.path, ignore_errors=True)
                # A folder that could not be removed still takes its space.
                total -= 0 if entry.path.exists() else entry.size_bytes
    return replace(plan, providers=tuple(providers))
