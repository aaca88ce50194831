"""The definition of a model: its checked configuration, its backend and its files. `FolderReading` reads a folder;
`complete_definition` adds what the loaded model reports."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from rocserve.backends.base import BackendSpec
from rocserve.backends.registry import ENSEMBLE_PLATFORM, BackendRegistry
from rocserve.config.backend_choice import choose_backend, describe_files, fill_backend_fields, matching_files
from rocserve.config.class_names import ClassNames, find_class_names, with_own_names
from rocserve.config.completion import autofill, fill_from_model, normalise, replace_declared_tensors
from rocserve.config.model_folder import FlatModel, Listing, ModelFolder, check_agents_known, read_labels, run_agents
from rocserve.config.plain import correct_by_signature, to_plain, version_policy
from rocserve.config.preprocess.text_files import TOKENIZER, has_tokenizer, has_tokenizers
from rocserve.config.request_rules import ConfigRequest
from rocserve.config.signature_checks import check_signature
from rocserve.config.sources import NO_FILE, read_written_config
from rocserve.config.validation import (
    check_loadable,
    check_model_config,
    check_readable,
    check_supported,
    check_warmup,
    check_warmup_fits,
)
from rocserve.config.written import WrittenConfig
from rocserve.core import model_config as plain
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.extras import install_command
from rocserve.core.model_config import InstanceKind
from rocserve.core.requests import Signature
from rocserve.presets import PREPROCESS, TEXT
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInstanceGroup


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """One model of a folder. A chain of AMD Inference Server defines several: the ensemble, then its members."""

    name: str
    folder: Path
    message: ModelConfig
    """The configuration that clients see. Never changed after it is made."""
    config: plain.ModelConfig
    """The configuration as plain data. Inputs and outputs are missing if the loaded model must supply them."""
    backend: BackendSpec | None
    """None for an ensemble."""
    warnings: tuple[str, ...]
    """For the log: somebody should change the configuration."""
    model_filenames: tuple[str, ...]
    """Names or patterns of the model's file in a version folder, best first; empty for an ensemble."""
    is_amd: bool
    """The configuration is in AMD Inference Server's dialect."""
    source: str
    """The configuration's file, relative to the folder."""
    repository: Path | None
    """Links may lead into this folder and the model's own folder; None = only into the model's own folder."""
    flat: FlatModel | None = None
    """The place of the model's file if not in a version folder."""
    refusal: ServeError | None = None
    """Why no version can be loaded; `config` then has only the name, the version policy and the parameters."""
    notes: tuple[str, ...] = ()
    """The completions that Triton logs too."""
    is_member: bool = False
    """The folder defines a chain, and this is one of its members."""
    class_names: ClassNames | None = None
    """Names for the classes of an output, if the configuration names no file of labels."""
    is_generated: bool = False
    """The server has generated the folder, code included."""
    is_preset_guessed: bool = False
    """The files suggest the parameter `preprocess`; the user has not set it."""

    @property
    def files(self) -> ModelFolder:
        """The folder's current state: each access lists it again."""
        return ModelFolder(self.folder, self.repository)

    def recorded_answers(self, version_folder: Path) -> Path | None:
        """Return the file of recorded answers; None = the version has none. Raises ServeError (INVALID_ARGUMENT) if it
        is a link that must not be followed."""
        # A file beside a chain's configuration belongs to the whole chain.
        return None if self.is_member else self.files.recorded_answers(version_folder)

    @property
    def serialized(self) -> bytes:
        """The message's bytes; equal for equal configurations."""
        return self.message.SerializeToString(deterministic=True)

    @property
    def is_ensemble(self) -> bool:
        return self.backend is None and self.refusal is None


def complete_definition(
    definition: ModelDefinition, signature: Signature | None, *, strict: bool = False
) -> ModelDefinition:
    """Complete a definition from the loaded model's report, and check one against the other. `signature`: None for an
    ensemble. `strict`: take nothing from the signature, so a missing setting is an error. Raises ServeError
    (INVALID_ARGUMENT) if the configuration and the model do not agree."""
    message, backend, warnings = deepcopy(definition.message), definition.backend, definition.warnings
    notes: tuple[str, ...] = ()
    # A model that answers requests may have no inputs or no outputs.
    is_open = backend is not None and backend.answers_requests
    if signature is not None:
        if not strict and definition.is_amd:
            warnings += replace_declared_tensors(message, signature)
        if not strict and is_open:
            fill_from_model(message, signature)
        elif not strict and backend is not None:
            notes = autofill(message, signature, backend.default_max_batch_size)
        normalise(message, backend)
        check_model_config(message, is_completed=not is_open)
        if is_open:
            # The report of such a model is its configuration, so there is nothing to compare.
            check_supported(message, backend)
        else:
            warnings += check_signature(message, signature)
    missing = [what for what in ("input", "output") if not getattr(message, what)]
    if is_open and len(missing) > 1:
        # Triton serves such a model, which answers nothing. Here the configuration counts as truncated.
        raise invalid_argument(
            f"must specify at least one 'input' or 'output' for {message.name}: neither its configuration nor its"
            " auto_complete_config names one"
        )
    if missing and not is_open:
        raise invalid_argument(f"must specify at least one '{missing[0]}' for {message.name}")
    labels = {output.name: output.labels for output in definition.config.outputs}
    has_filled = not is_open and message.max_batch_size > 0 and definition.message.max_batch_size == 0
    # A definition may be completed again, for another version.
    is_chosen = has_filled or definition.config.is_batch_size_chosen
    config = replace(to_plain(message, definition.config.backend, labels), is_batch_size_chosen=is_chosen)
    if definition.class_names is not None:
        config, unused = definition.class_names.given_to(config, message)
        warnings += unused
    elif signature is not None and not any(labels.values()):
        config = with_own_names(config, signature.purpose)
    check_warmup_fits(message, config)
    return replace(
        definition,
        message=message,
        config=config if signature is None else correct_by_signature(config, signature),
        warnings=warnings,
        notes=notes,
    )


def with_places(definition: ModelDefinition, places: Sequence[tuple[InstanceKind, Sequence[int]]]) -> ModelDefinition:
    """Return the definition with `places`: each instance group's final kind (not KIND_AUTO) and GPUs."""
    message = deepcopy(definition.message)
    for group, (kind, gpus) in zip(message.instance_group, places, strict=False):
        group.kind = cast("ModelInstanceGroup.Kind", ModelInstanceGroup.Kind.Value(kind.value))
        group.gpus[:] = gpus
    return replace(definition, message=message)


def find_model_file(definition: ModelDefinition, version_folder: Path, architecture: str = "") -> Path:
    """Return the model's file (or folder, for some formats) in a version folder; the folder itself for an ensemble.
    `architecture`: the target GPU's, e.g. "gfx90a"; "" = a CPU, or unknown. Raises ServeError (INVALID_ARGUMENT) that
    lists the expected and the present files."""
    if definition.backend is None:
        return version_folder
    # ROCm adds features to the name: gfx90a:sramecc+:xnack-.
    own = definition.config.cc_model_filenames.get(architecture.split(":")[0])
    filenames = definition.model_filenames if own is None else (own,)
    place = Listing(version_folder)
    matches = matching_files(place, filenames)
    expected = " or ".join(filenames)
    if len(matches) != 1:
        found = f"{len(matches)} that match: {', '.join(matches)}" if matches else describe_files(place)
        raise invalid_argument(
            f"unable to find the model file of '{definition.name}' in version folder {version_folder.name}: expected"
            f" {expected}, found {found}. Rename the file, set default_model_filename, or set the backend that reads it"
        )
    return definition.files.resolve(matches[0], f"model file of '{definition.name}'", str(version_folder))


@dataclass(frozen=True)
class FolderReading:
    """Reads the models of a folder and validates them without loading them."""

    folder: Path
    registry: BackendRegistry
    name: str = ""
    """Expected name of the model; "" = the folder's name."""
    config_name: str = ""
    """Read configs/<config_name>.pbtxt if it exists (tritonserver's --model-config-name)."""
    strict: bool = False
    """Complete nothing from the files (tritonserver's --disable-auto-complete-config)."""
    request: ConfigRequest | None = None
    """A load request's configuration, which replaces the folder's within the rules."""
    repository: Path | None = None
    """Links may lead into this folder; None = only into the model's folder."""
    namespace: str = ""
    """An ensemble's steps prefer members of this namespace."""
    flat: FlatModel | None = None
    """The place of the model's file if not in a version folder."""
    renames: bool = False
    """`name` overrides the configuration's name."""
    preprocess: str = ""
    """Overrides the parameter `preprocess`; "" = the parameter stays."""
    labels: Path | None = None
    """The file of `--labels`; None = labels.txt in the folder, if it exists."""
    guesses_preset: bool = False
    """A model with a tokenizer and without a configuration counts as a text encoder."""

    @cached_property
    def files(self) -> ModelFolder:
        return ModelFolder(self.folder, self.repository)

    def written(self) -> WrittenConfig:
        """Read the configuration as written. Raises ServeError (INVALID_ARGUMENT)."""
        return read_written_config(
            self.files,
            self.name or self.folder.name,
            config_name=self.config_name,
            strict=self.strict,
            override_json=None if self.request is None else self.request.json,
            is_alone=self.flat is not None and self.flat.is_alone,
        )

    def definitions(
        self, written: WrittenConfig | None = None, *, keep_refused: bool = False
    ) -> tuple[ModelDefinition, ...]:
        """Define the models. `written` replaces the folder's configuration. `keep_refused`: return definitions that
        cannot be loaded, with their `refusal`, instead of raising it. Raises ServeError: INVALID_ARGUMENT with the
        fault and its position, UNIMPLEMENTED for unsupported settings; RequestRefused for settings that a client may
        not set."""
        written = written or self.written()
        if self.labels is not None and len(written.models) > 1:
            raise invalid_argument(
                f"--labels={self.labels.name} is for one model; this folder has {len(written.models)}"
            )
        definitions = tuple(
            replace(self._define(model, written, () if place else written.warnings), is_member=place > 0)
            for place, model in enumerate(written.models)
        )
        for definition in definitions:
            if definition.refusal is not None and not keep_refused:
                raise definition.refusal
        return definitions

    def _define(self, model: ModelConfig, written: WrittenConfig, warnings: tuple[str, ...]) -> ModelDefinition:
        message = self._named(model, written)
        for step in message.ensemble_scheduling.step:
            # As in Triton, the ensemble's namespace replaces a written one.
            step.model_namespace = self.namespace
        found = choose_backend(message, self.registry, self.files, strict=self.strict)
        backend, refusal = (None, found) if isinstance(found, ServeError) else (found, None)
        if self.request is not None:
            self.request.apply_rules(message, backend)
        if self.preprocess:
            message.parameters[PREPROCESS].string_value = self.preprocess
        suggests_text = not self.preprocess and self.guesses_preset and written.source == NO_FILE
        suggests_text = suggests_text and has_tokenizer(self.files)
        is_guessed = suggests_text and has_tokenizers()
        if is_guessed:
            message.parameters[PREPROCESS].string_value = TEXT
        elif suggests_text:
            warnings += (
                f"model '{message.name}': {TOKENIZER} is not used, because the package tokenizers is not installed; to"
                f" serve texts too: {install_command('text')}",
            )
        filenames: tuple[str, ...] = ()
        if backend is not None:
            own = message.default_model_filename
            filenames = (own,) if own else written.model_filenames or backend.model_filenames
            fill_backend_fields(message, backend, self.files, filenames)
        normalise(message, backend)
        check_readable(message)
        check_agents_known(message)
        definition = ModelDefinition(
            name=message.name,
            folder=self.folder,
            message=message,
            config=plain.ModelConfig(
                message.name,
                version_policy=version_policy(message.version_policy),
                parameters={key: value.string_value for key, value in sorted(message.parameters.items())},
            ),
            backend=backend,
            warnings=warnings + self.files.ignored_versions,
            model_filenames=filenames,
            is_amd=written.is_amd,
            source=written.source,
            repository=self.repository,
            flat=self.flat,
            refusal=refusal,
            is_preset_guessed=is_guessed,
        )
        try:
            return definition if refusal is not None else self._checked(definition, len(written.models) == 1)
        except ServeError as error:
            return replace(definition, backend=None, refusal=error.with_traceback(None).lasting())

    def _checked(self, definition: ModelDefinition, is_alone: bool) -> ModelDefinition:
        """Complete and check a definition. `is_alone`: the folder defines no other model. Raises ServeError if no
        version of it can be loaded."""
        message, backend = definition.message, definition.backend
        check_loadable(message)
        warnings = check_supported(message, backend)
        check_warmup(message, self.files)
        run_agents(message, self.files)
        name = backend.name if backend else ENSEMBLE_PLATFORM
        labels = read_labels(message, self.folder)
        if labels and self.labels is not None:
            files = ", ".join(sorted({output.label_filename for output in message.output if output.label_filename}))
            warnings += (f"--labels={self.labels.name} is not used: the configuration names label_filename '{files}'",)
        return replace(
            definition,
            config=to_plain(message, name, labels),
            warnings=definition.warnings + warnings,
            class_names=find_class_names(self.files, self.labels) if is_alone and not labels else None,
        )

    def _named(self, model: ModelConfig, written: WrittenConfig) -> ModelConfig:
        message, name = deepcopy(model), self.name or self.folder.name
        if not written.is_amd:
            message.name = name if self.renames else message.name or name
            if self.flat is not None:
                message.default_model_filename = message.default_model_filename or self.flat.file
            if message.name != name:
                raise invalid_argument(
                    f"unexpected directory name '{name}' for model '{message.name}', directory name must equal"
                    " model name"
                )
        return message
