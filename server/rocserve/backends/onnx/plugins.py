"""Finds execution providers that are separate libraries ("plugins"), in packages named onnxruntime-ep-*, and registers
them with ONNX Runtime.

A session gets a plugin by its devices, not by its name: with a name for which there is no device, ONNX Runtime only
warns, and runs on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from rocserve.backends.migraphx.installation import find_installation, remedy_if_missing
from rocserve.backends.onnx.provider_options import MIGRAPHX_PROVIDER
from rocserve.core.errors import ServeError
from rocserve.jobs.messages import Report
from rocserve.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Plugin:
    """A package with an execution provider that ONNX Runtime loads as a plugin."""

    module: str
    provider: str
    """ONNX Runtime's name of the provider."""
    library: str

    @property
    def package(self) -> str:
        """The Python package and its version."""
        from importlib.metadata import PackageNotFoundError, version  # Here: 8 ms of the zygote's start.

        name = self.module.replace("_", "-")
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
        return name

    def devices(self, migraphx: str) -> Sequence[Any]:
        """Return the OrtEpDevices that the plugin can use in this process, after registering it. Loads the plugin's
        libraries. `migraphx`: MIGraphX's library, for AMD's plugin; "" = not found. Raises RuntimeError with the reason
        if it cannot be registered."""
        if not hasattr(onnxruntime, "register_execution_provider_library"):
            raise RuntimeError(f"ONNX Runtime {onnxruntime.__version__} takes no plugins; install 1.24 or newer")
        if self.provider == MIGRAPHX_PROVIDER.provider:
            # The plugin opens these libraries by name, and its package does not say where they are.
            libraries = map(str, Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
            for file in filter(None, (*libraries, migraphx)):
                with suppress(OSError):
                    ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
        try:
            # AMD's providers have the name by which they are registered.
            onnxruntime.register_execution_provider_library(self.provider, self.library)
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            if "already registered" not in str(error):
                raise RuntimeError(f"ONNX Runtime cannot register it: {error}{remedy_if_missing(str(error))}") from None
        own = (self.provider, f"{self.provider}.")
        return [one for one in onnxruntime.get_ep_devices() if one.ep_name == own[0] or one.ep_name.startswith(own[1])]


def migraphx_library(settings: EngineSettings) -> str:
    """Return the path of MIGraphX's C library; "" = not found."""
    with suppress(ServeError):
        return find_installation(settings).library
    return ""


def installed_plugins() -> Mapping[str, Plugin]:
    """Return the plugins by their providers. Imports the packages' modules, which return the paths of the libraries. A
    package whose module fails is left out."""
    plugins = {}
    # pkgutil.iter_modules takes ten times as long.
    files = (file for folder in sys.path for file in Path(folder or ".").glob("onnxruntime_ep_*/__init__.py"))
    for name in sorted({file.parent.name for file in files}):
        with suppress(Exception):  # Third-party code.
            module = importlib.import_module(name)
            for provider in module.get_ep_names():
                plugins[str(provider)] = Plugin(name, str(provider), str(module.get_library_path()))
    return plugins


def gpu_devices(devices: Sequence[Any], number: int) -> Sequence[Any]:
    """Return the GPU of this number; empty = there is none."""
    gpus = [one for one in devices if one.device.type == onnxruntime.OrtHardwareDeviceType.GPU]
    return gpus[number : number + 1]


def openvino_devices(devices: Sequence[Any], wanted: str) -> Sequence[Any]:
    """Return the devices for a `device_type` of OpenVINO's: "CPU", "GPU.1", or "AUTO:GPU,CPU"; empty = one is missing.
    A provider with several devices has another name."""
    group, colon, names = wanted.partition(":")
    by_group = bool(colon) or group.upper() == "AUTO"
    own = [one for one in devices if one.ep_name.endswith(f".{group.upper()}")] if by_group else list(devices)
    if by_group and not colon:
        return own
    found = []
    for name in (names if by_group else wanted).split(","):
        forms = (name.strip().upper(), f"{name.strip().upper()}.0")
        match = [one for one in own if one.ep_metadata.get("ov_device", "").upper() in forms]
        if not match:
            return ()
        found.append(match[0])
    return found


def seen_devices() -> str:
    """Return the devices that ONNX Runtime has found on this machine, as users read them: "CPU of AMD"."""
    return ", ".join(dict.fromkeys(map(_described, onnxruntime.get_ep_devices()))) or "none"


def _described(device: Any) -> str:
    return f"{device.device.type.name} of {device.device.vendor}"


@dataclass(frozen=True, slots=True)
class PluginReport:
    """The devices that a plugin finds, or why it cannot be used."""

    package: str
    provider: str
    devices: tuple[str, ...] = ()
    fault: str = ""
    """Why the plugin cannot be registered; "" = it can."""


@dataclass(frozen=True, slots=True)
class PluginReports:
    """The reports on all plugins that are installed."""

    plugins: tuple[PluginReport, ...] = ()
    seen: str = ""
    """See `seen_devices`."""


@dataclass(frozen=True, slots=True)
class PluginsJob:
    """Registers the plugins. In a child process, because their libraries may crash without a usable GPU."""

    migraphx: str
    """See `Plugin.devices`."""

    @property
    def title(self) -> str:
        return "registering ONNX Runtime's plugins"

    def perform(self, report: Report) -> PluginReports:
        found = []
        for plugin in installed_plugins().values():
            report(f"registering {plugin.package}")
            try:
                devices = tuple(map(_described, plugin.devices(self.migraphx)))
                found.append(PluginReport(plugin.package, plugin.provider, devices))
            except RuntimeError as error:
                found.append(PluginReport(plugin.package, plugin.provider, fault=str(error)))
        return PluginReports(tuple(found), seen_devices())
