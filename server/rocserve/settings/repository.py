"""The settings of the model repositories, and of a single served model."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.remote_places import RemotePlace, is_url, parse_remote
from rocserve.presets import NAMES
from rocserve.settings.flag import (
    BOOLEAN,
    BYTE_SIZE,
    FILE,
    FOLDER,
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    SECONDS_IN_INT32_MS,
    Kind,
    boolean,
    flag,
    one_of,
    repeated,
    text,
)


class ControlMode(enum.Enum):
    """Decides which models are loaded (--model-control-mode)."""

    NONE = "none"
    """Load every model of the repository when the server starts."""
    POLL = "poll"
    """Load every model in the repository, and follow its changes."""
    EXPLICIT = "explicit"
    """Load the models that --load-model and clients name."""


class ReadinessRule(enum.Enum):
    """Decides when the server reports that it is ready (--strict-readiness)."""

    STARTED = "false"
    """After the first loads, even if they failed."""
    KEPT = "true"
    """After all models present at the start serve, as long as every model that has served still does."""
    ALWAYS = "always"
    """While every wanted version serves: Triton's rule."""


def readiness_rule(text: str) -> ReadinessRule:
    if text.lower() == ReadinessRule.ALWAYS.value:
        return ReadinessRule.ALWAYS
    try:
        return ReadinessRule.KEPT if boolean(text) else ReadinessRule.STARTED
    except ValueError:
        raise ValueError(f"expected true, false or always, got '{text}'") from None


def repository(text: str) -> Path | RemotePlace:
    if not text:
        # An empty path would mean the working directory.
        raise ValueError("expected a path or a URL, got ''; is a variable of the shell not set?")
    return parse_remote(text) if is_url(text) else Path(text)


class WhatKind(enum.Enum):
    """The kinds of WHAT, in the log's words."""

    FILE = "a model file"
    FILES = "a folder with a model's files"
    MODEL = "a model folder"
    REPOSITORY = "a model repository"


@dataclass(frozen=True, slots=True)
class SingleModel:
    """The single model that the command line names."""

    kind: WhatKind
    folder: Path
    file: str
    """The named file; "" = each scan looks for the model's file in the folder."""
    name: str
    is_named: bool
    """The user chose the name, so it overrides the configuration's."""


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """Limits of loaded models. Without a limit, requests load only models that set the parameter idle_unload_secs."""

    max_loaded_models: int | None = flag(
        None,
        POSITIVE,
        "model versions that are loaded at the same time; requests load the others"
        " (docs/guides/many-models.md; default: all)",
    )
    max_model_memory: int | None = flag(
        None, BYTE_SIZE, "memory for all loaded models' workers; idle models are unloaded to make room (default: any)"
    )
    max_model_gpu_memory: int | None = flag(
        None, BYTE_SIZE, "memory of each GPU for loaded models; idle models are unloaded to make room (default: any)"
    )
    wait_for_model: bool = flag(True, BOOLEAN, "let requests wait for their model's load instead of refusing them")
    model_wait_seconds: float = flag(60.0, POSITIVE_SECONDS, "how long a request may wait for its model to be loaded")


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """The flags of the model repository."""

    roots: tuple[Path, ...] = repeated(
        Kind("DIR|URL", repository),
        "a folder of models, or s3://, gs://, as://, hf://, https:// (docs/guides/remote-repositories.md)",
        aliases=("model-store",),
        name="model-repository",
    )
    model_name: str = flag(
        "",
        text("NAME"),
        "name of the model WHAT (default: $MODEL_NAME, else the configuration's name, else the file's)",
    )
    preprocess: str = flag(
        "",
        one_of(NAMES),
        "for the model WHAT, also serve NAME_image, which takes pictures and returns labels or boxes"
        " (docs/guides/image-models.md), or (text) NAME_text, which takes texts (docs/guides/text-models.md)",
    )
    labels: Path | None = flag(
        None,
        FILE,
        "file with the class names of the model WHAT, one per line (default: labels.txt next to the model's file or"
        " config.pbtxt)",
    )
    control_mode: ControlMode = flag(
        ControlMode.POLL,
        one_of(mode.value for mode in ControlMode),
        "poll: follow changes of the folder; none: load all models at the start; explicit: load the models that"
        " --load-model and clients name",
        make=ControlMode,
        name="model-control-mode",
    )
    load_models: tuple[str, ...] = repeated(
        text("MODEL"), "load this model at the start under explicit control; * = all", name="load-model"
    )
    settle_seconds: float = flag(
        0.5, SECONDS_IN_INT32_MS, "how long files must be unchanged before they count", name="repository-settle-secs"
    )
    poll_seconds: float = flag(
        15.0, SECONDS, "pause between scans for changes that come without a notification", name="repository-poll-secs"
    )
    remote_cache_size_bytes: int | None = flag(
        None, POSITIVE, "bytes for remote repositories in --cache-directory (default: all but a tenth of its disk)"
    )
    concurrent_loads: int = flag(4, POSITIVE, "models that load at the same time", name="model-load-thread-count")
    strict_model_config: bool = flag(
        False,
        BOOLEAN,
        "do not complete configurations from the model's file",
        aliases=("strict-model-config",),
        name="disable-auto-complete-config",
    )
    model_config_name: str = flag("", text("NAME"), "read configs/NAME.pbtxt, if it exists, instead of config.pbtxt")
    model_namespacing: bool = flag(False, BOOLEAN, "let models of different repositories have the same name")
    allow_remote_files: bool = flag(False, BOOLEAN, "let load requests send a model's files, under explicit control")
    allow_remote_models: bool = flag(False, BOOLEAN, "let load requests with files create new models")
    allow_amd_endpoints: bool | None = flag(
        None, BOOLEAN, "let WorkerLoad serve files of the repositories (default: under explicit control)"
    )
    max_amd_endpoints: int = flag(
        64, POSITIVE, "models that WorkerLoad may serve at the same time; each further instance counts as one"
    )
    max_model_instances: int | None = flag(
        None, POSITIVE, "instances of a model (default 8 for each CPU, or 64 for each of its GPUs)"
    )
    max_model_versions: int = flag(128, POSITIVE, "versions of a model that are served at the same time")
    max_folder_entries: int = flag(100_000, POSITIVE, "files and folders that a model's folder may hold")
    worker_load_folders: tuple[Path, ...] = repeated(
        FOLDER, "folder with files that WorkerLoad may serve", name="allow-worker-load"
    )
    readiness: ReadinessRule = flag(
        ReadinessRule.KEPT,
        Kind("true|false|always", readiness_rule, alone="true"),
        "true: ready when the models of the start serve; false: when their loads have ended; always: only while every"
        " model serves, as in Triton",
        group="server",
        name="strict-readiness",
    )
    remotes: tuple[RemotePlace, ...] = ()
    """Remote repositories; `roots` has the folders of their copies."""
    single: SingleModel | None = None
    """The only model, in the only root; None = the roots are repositories."""
    ends_on_failure: bool = False
    """The server ends if a model fails at the start, so failed first loads are not retried."""
    long_load_seconds: float = 10.0
    """A load of this duration frees its slot for the next one."""
    retry_seconds: float = 1.0
    """Pause before the first retry of a load; doubled with each failure."""
    longest_retry_seconds: float = 300.0
