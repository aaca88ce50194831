"""Finds the model that a tool works on: a model folder, read as the server reads it, or a bare model file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocserve.backends.base import BackendSpec, ModelSource
from rocserve.backends.migraphx.engine_choice import MIGRAPHX
from rocserve.backends.pytorch.engine_choice import EAGER
from rocserve.backends.registry import BackendRegistry, discover_backends
from rocserve.config.backend_choice import advice_on_files
from rocserve.config.definition import FolderReading, ModelDefinition, find_model_file
from rocserve.config.model_folder import FlatModel, no_version_text, select_versions
from rocserve.config.written import WrittenConfig
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InstanceKind
from rocserve.core.printable import printable_name
from rocserve.flags import FlagError
from rocserve.protocol import model_config_pb2 as messages
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.scan import ModelScan, scan_model
from rocserve.repository.scanner import UNPRINTABLE, has_config, is_model
from rocserve.settings import EngineSettings, RepositorySettings, engine_settings
from rocserve.settings.flag import SECONDS, SWITCH, Kind, flag, one_of, part, positional, text

_BATCH_PARAMETERS = ("batch", "batch_sizes")
_PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8")


def counts(text: str) -> tuple[int, ...]:
    """Parse "1,2,4" into ascending numbers without duplicates."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) <= 9 and int(word) > 0 for word in words):
        raise ValueError(f"expected whole numbers of 1 or more with commas between, got '{text}'")
    return tuple(sorted({int(word) for word in words}))


def precisions(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    if not set(words) <= set(_PRECISIONS):
        raise ValueError(f"expected one of {', '.join(_PRECISIONS)}, got '{text}'")
    return words


COUNTS = Kind("N,N,...", counts)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Holds the options of a command line that replace parts of the model's configuration."""

    model: Path = positional(
        Path(), Kind("MODEL", Path), "a model's folder, or a .onnx, .pb, .graphdef, .mxr, .pt2 or .pt file"
    )
    config_name: str = flag(
        "", text("NAME"), "read configs/NAME.pbtxt instead of config.pbtxt, if it exists", name="model-config-name"
    )
    target: str | None = flag(
        None, one_of(("gpu", "cpu", "ref")), "the target that MIGraphX compiles for (default: gpu if there is one)"
    )
    batch_sizes: tuple[int, ...] = flag((), COUNTS, "batch sizes, in place of the model's")
    precision: tuple[str, ...] = flag(
        (),
        Kind("NAME", precisions),
        f"{', '.join(_PRECISIONS[:-1])} or {_PRECISIONS[-1]}; compare takes several, with commas between",
    )
    calibration_data: Path | None = flag(
        None,
        Kind("PATH", Path),
        "inputs to calibrate int8 and fp8 with: an .npz file, or a folder of .npy or .jpg files",
    )
    input_shapes: str | None = flag(
        None,
        text("TEXT"),
        'shapes of inputs that the model leaves open, without the batch dimension: "image: 3x224x224; mask: 224x224"',
    )
    fast_math: bool | None = flag(
        None, SWITCH, "let MIGraphX approximate some functions (default true; off: --fast-math=false)"
    )
    exhaustive_tune: bool | None = flag(None, SWITCH, "let MIGraphX try all its kernels (default false)")
    miopen_tuning: bool | None = flag(None, SWITCH, "let MIOpen search for the fastest kernels (default false)")
    compile_timeout_secs: float | None = flag(
        None, SECONDS, "time limit for compiling one program (default 3600; 0 = no limit)"
    )
    binding: str | None = flag(
        None,
        one_of(("auto", "c_api", "module")),
        "call MIGraphX through its C API or its Python module (default auto)",
    )
    engines: EngineSettings = part(engine_settings)

    def parameters(self) -> dict[str, str]:
        """Return the options as `parameters` of config.pbtxt. Raises FlagError if there are several precisions."""
        same_names = ("target", "input_shapes", "fast_math", "exhaustive_tune", "miopen_tuning", "binding")
        parameters = {name: value for name in same_names if (value := getattr(self, name)) is not None}
        if self.compile_timeout_secs is not None:
            parameters["compile_timeout_secs"] = f"{self.compile_timeout_secs:g}"
        if len(self.precision) > 1:
            raise FlagError("argument --precision: several of them need `rocserve compare`, which compares them")
        if self.precision:
            parameters["precision"] = self.precision[0]
        return {name: str(value).lower() if isinstance(value, bool) else value for name, value in parameters.items()}


@dataclass(frozen=True, slots=True)
class ToolModel:
    source: ModelSource
    """With the command line's options in its configuration."""
    definition: ModelDefinition
    """Without the command line's options."""
    calibration_data: str = ""
    """The path as given on the command line; "" = not given."""

    @property
    def backend(self) -> BackendSpec:
        assert self.definition.backend is not None, "tools take no ensembles"
        return self.definition.backend

    @property
    def is_bare(self) -> bool:
        """Whether the model is a file without a model folder."""
        return self.definition.flat is not None

    @property
    def order(self) -> LoadOrder:
        """What a server's workers would load."""
        source = self.source
        definition = replace(self.definition, folder=source.model_folder, config=source.config)
        return LoadOrder(definition, source.version, source.version_folder)

    def with_file(self, file: Path, backend: BackendSpec) -> ToolModel:
        """Return the model with another file of its version folder."""
        definition = replace(self.definition, backend=backend, model_filenames=(file.name,))
        return replace(self, source=replace(self.source, model_file=file), definition=definition)

    def with_config(self, **changes: Any) -> ToolModel:
        """Return the model with other fields of its configuration."""
        return replace(self, source=replace(self.source, config=replace(self.source.config, **changes)))

    def with_parameters(self, **parameters: str | None) -> ToolModel:
        """Return the model with these parameters set; a value of None removes the parameter."""
        added = {name: text for name, text in parameters.items() if text is not None}
        return self.with_config(parameters={**_without(self.source.config.parameters, parameters), **added})

    def with_precision(self, precision: str) -> ToolModel:
        """Return the model in another precision, without its calibration if the precision needs none."""
        if precision in ("int8", "fp8"):
            return self.with_parameters(precision=precision)
        parameters = ("calibration_data", "calibration_pipeline", "calibration_samples")
        model = self.with_parameters(precision=precision, **dict.fromkeys(parameters))
        accelerators = [
            replace(one, parameters=_without(one.parameters, parameters))
            for one in model.source.config.gpu_accelerators
        ]
        return model.with_config(gpu_accelerators=tuple(accelerators))


def _without(parameters: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: text for name, text in parameters.items() if name not in names}


def find_model(options: ModelOptions) -> ToolModel:
    """Return the model that the options name, with the options applied to its configuration. Raises ServeError if there
    is no such model or its configuration is wrong."""
    path, registry = options.model.absolute(), discover_backends()
    if path.is_dir():
        model = _from_folder(path, options, registry)
    elif path.is_file():
        model = _from_file(path, registry, options.engines)
    else:
        raise invalid_argument(
            "does not exist; expected a model's folder, or a .onnx, .pb, .graphdef, .mxr, .pt2 or .pt file"
        )
    parameters = options.parameters()
    if options.calibration_data is not None:
        model, parameters["calibration_data"] = _with_calibration_data(model, options.calibration_data)
    if "precision" in parameters:
        model = model.with_precision(parameters["precision"])
    model = model.with_parameters(**parameters)
    return with_batch_sizes(model, options.batch_sizes) if options.batch_sizes else model


def read_folder(folder: Path, registry: BackendRegistry, config_name: str, *, strict: bool = False) -> FolderReading:
    """Return a reading of the model's folder; nothing of its configuration is read yet. Raises ServeError if the folder
    is a model repository, or if a model cannot have the folder's name."""
    folder = folder.resolve()
    if (name := printable_name(folder.name)) != folder.name:
        raise invalid_argument(UNPRINTABLE.format(name))
    if not is_model(folder):
        models = sorted(child.name for child in folder.iterdir() if has_config(child))
        if models:
            raise invalid_argument(f"is a model repository; give the folder of one of its models: {', '.join(models)}")
    # The repository is passed because files may be links into a neighbouring model's folder, as in a server.
    return FolderReading(folder, registry, config_name=config_name, strict=strict, repository=folder.parent)


@contextmanager
def advised(reading: FolderReading) -> Iterator[None]:
    """Add a server's hints on misplaced files to errors raised in the block, because such a file may be the cause."""
    try:
        yield
    except ServeError as error:
        folder = reading.folder
        filenames = tuple(name for backend in reading.registry.backends for name in backend.model_filenames)
        most_entries = RepositorySettings().max_folder_entries
        scan = scan_model(ModelScan(folder.name, folder, folder.parent), (folder.parent,), most_entries, filenames)
        raise scan.advised(error) from None


def newest_version(definition: ModelDefinition) -> int:
    """Return the newest version that the policy serves. Raises ServeError (INVALID_ARGUMENT) if there is none."""
    versions = select_versions(definition.config.version_policy, definition.files.versions)
    if not versions:
        raise invalid_argument(no_version_text(definition.config))
    return versions[-1]


def _from_folder(folder: Path, options: ModelOptions, registry: BackendRegistry) -> ToolModel:
    reading = read_folder(folder, registry, options.config_name)
    with advised(reading):
        definition, *members = reading.definitions()
    folder = definition.folder
    if definition.backend is None:
        names = [member.name for member in members] or [step.model_name for step in definition.config.ensemble_steps]
        raise invalid_argument(f"is an ensemble, which no engine runs; give one of its models: {', '.join(names)}")
    if not _takes_arrays(definition.backend):
        raise invalid_argument(
            f"is of backend '{definition.backend.name}', whose models no engine runs; this is for ONNX, TensorFlow,"
            " PyTorch and .mxr models"
        )
    with advised(reading):
        version = newest_version(definition)
    file = find_model_file(definition, folder / str(version))
    return ToolModel(_source(definition, file, options.engines, version, folder / str(version)), definition)


def _from_file(path: Path, registry: BackendRegistry, settings: EngineSettings) -> ToolModel:
    by_ending = {ending: spec for spec in registry.backends if _takes_arrays(spec) for ending in spec.file_endings}
    backend = by_ending.get(path.suffix.lower())
    if backend is None:
        raise invalid_argument(
            f"has the ending '{path.suffix}'; expected one of {', '.join(by_ending)}, or a folder"
            f"{advice_on_files(path.name)}"
        )
    # A file may be a link, for example into a download's cache.
    root = Path(os.path.commonpath((path.parent.resolve(), path.resolve().parent)))
    flat = FlatModel(path.name, is_alone=True)
    reading = FolderReading(path.parent, registry, printable_name(path.stem), repository=root, flat=flat)
    written = WrittenConfig((messages.ModelConfig(backend=backend.name),), "no configuration file")
    (definition,) = reading.definitions(written)
    return ToolModel(_source(definition, path, settings, 1, path.parent), definition)


def _source(
    definition: ModelDefinition, file: Path, settings: EngineSettings, version: int, version_folder: Path
) -> ModelSource:
    config = definition.config
    group = next(iter(config.instance_groups), None)
    return ModelSource(
        name=config.name,
        version=version,
        model_folder=definition.folder,
        version_folder=version_folder,
        model_file=file,
        config=config,
        instance_kind=group.kind if group else InstanceKind.AUTO,
        device=group.gpus[0] if group and group.gpus else None,
        instance_count=1,
        settings=settings,
    )


def _takes_arrays(backend: BackendSpec) -> bool:
    return MIGRAPHX in backend.engines or EAGER in backend.engines


def with_batch_sizes(model: ToolModel, sizes: tuple[int, ...]) -> ToolModel:
    """Return the model restricted to these batch sizes. Raises ServeError if the model does not batch."""
    config = model.source.config
    if config.max_batch_size == 0 and config.inputs:
        raise invalid_argument("does not batch (max_batch_size: 0), so there is one program; remove --batch-sizes")
    parameters = {**dict.fromkeys(_BATCH_PARAMETERS), "batch_sizes": ",".join(map(str, sizes))}
    return model.with_parameters(**parameters).with_config(max_batch_size=max(*sizes, config.max_batch_size))


def configured_as(bare: ToolModel, model: ToolModel) -> ToolModel:
    """Return a bare model, whose inputs have fixed sizes, with the engine's settings of `model`'s configuration."""
    config = model.source.config
    sizes = (*_BATCH_PARAMETERS, "input_shapes")
    return bare.with_parameters(**_without(config.parameters, sizes)).with_config(
        instance_groups=config.instance_groups,
        gpu_accelerators=config.gpu_accelerators,
        cpu_accelerators=config.cpu_accelerators,
        operator_libraries=config.operator_libraries,
    )


def _with_calibration_data(model: ToolModel, typed: Path) -> tuple[ToolModel, str]:
    """Return the model, and the data's path relative to the model's folder, as `calibration_data` needs it."""
    folder, data = model.source.model_folder, typed.absolute()
    model = replace(model, calibration_data=str(typed))
    if not data.exists():
        raise invalid_argument(f"the calibration data {typed} does not exist")
    if data.is_relative_to(folder):
        return model, str(data.relative_to(folder))
    if not model.is_bare:
        raise invalid_argument(
            f"the calibration data {typed} is outside of the model's folder, where a server would read it; copy it"
            " there"
        )
    # A bare file has no model folder, so the deepest folder that contains both serves as one.
    common = Path(os.path.commonpath((folder, data)))
    return replace(model, source=replace(model.source, model_folder=common)), str(data.relative_to(common))
