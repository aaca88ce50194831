"""What is said of the model repositories, and of the one model that may be served in their place."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.remote_places import RemotePlace, parse_remote
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
    """Who says which models are loaded (--model-control-mode)."""

    NONE = "none"
    """All that is in the repository when the server starts."""
    POLL = "poll"
    """All that is in the repository, whenever it changes."""
    EXPLICIT = "explicit"
    """What --load-model and clients name."""


class ReadinessRule(enum.Enum):
    """When the server calls itself ready (--strict-readiness)."""

    STARTED = "false"
    """Once the first loads have ended, whatever came of them."""
    KEPT = "true"
    """Once all that was there at the start serves, and as long as all that has served still does."""
    ALWAYS = "always"
    """While every version that is to be served is: Triton's rule."""


def readiness_rule(text: str) -> ReadinessRule:
    if text.lower() == ReadinessRule.ALWAYS.value:
        return ReadinessRule.ALWAYS
    try:
        return ReadinessRule.KEPT if boolean(text) else ReadinessRule.STARTED
    except ValueError:
        raise ValueError(f"expected true, false or always, got '{text}'") from None


def repository(text: str) -> Path | RemotePlace:
    if not text:
        # It would be the folder that the server is started in.
        raise ValueError("expected a path or a URL, got ''")
    return parse_remote(text) if "://" in text else Path(text)


class WhatKind(enum.Enum):
    """In the words of the log."""

    FILE = "a model file"
    FILES = "a folder with a model's files"
    MODEL = "a model folder"
    REPOSITORY = "a model repository"


@dataclass(frozen=True, slots=True)
class SingleModel:
    """The one model that is served."""

    kind: WhatKind
    folder: Path
    file: str
    """The file that was named; "" = the one that is found in the folder, at each scan anew."""
    name: str
    is_named: bool
    """The name was given, and goes before that in a configuration."""


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """Which of the models are loaded. Without a limit all are."""

    max_loaded_models: int | None = flag(
        None,
        POSITIVE,
        "model versions that are loaded at once; all are registered, and loaded when they are asked for"
        " (docs/guides/many-models.md; default: all)",
    )
    max_model_memory: int | None = flag(
        None, BYTE_SIZE, "memory that the workers of loaded models may take, likewise (default: any)"
    )
    max_model_gpu_memory: int | None = flag(
        None, BYTE_SIZE, "memory of each GPU that loaded models may take, likewise (default: any)"
    )
    wait_for_model: bool = flag(
        True, BOOLEAN, "have requests wait until their model is loaded, instead of refusing them meanwhile"
    )
    model_wait_seconds: float = flag(60.0, POSITIVE_SECONDS, "how long a request waits for its model to be loaded")


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    roots: tuple[Path, ...] = repeated(
        Kind("DIR|URL", repository),
        "a folder of models, or s3://, gs://, as://, hf://, https:// (docs/guides/remote-repositories.md)",
        aliases=("model-store",),
        name="model-repository",
    )
    model_name: str = flag(
        "",
        text("NAME"),
        "what the model that WHAT names is called (default: MODEL_NAME of the environment, else what its"
        " configuration says, else its file's name)",
    )
    preprocess: str = flag(
        "",
        one_of(NAMES),
        "make NAME_image beside the model that WHAT names: JPEGs and PNGs in, labels or boxes out"
        " (docs/guides/image-models.md)",
    )
    labels: Path | None = flag(
        None, FILE, "the names of that model's classes, a line each (default: labels.txt beside the model)"
    )
    control_mode: ControlMode = flag(
        ControlMode.POLL,
        one_of(mode.value for mode in ControlMode),
        "poll: follow the folder; none: load all that is there at the start; explicit: load what --load-model and"
        " clients name",
        make=ControlMode,
        name="model-control-mode",
    )
    load_models: tuple[str, ...] = repeated(
        text("MODEL"), "load this at the start in explicit mode; * = all", name="load-model"
    )
    settle_seconds: float = flag(
        0.5,
        SECONDS_IN_INT32_MS,
        "how long a model's files must stay unchanged before a change counts",
        name="repository-settle-secs",
    )
    poll_seconds: float = flag(
        15.0, SECONDS, "how often to scan even without a notification of a change", name="repository-poll-secs"
    )
    remote_cache_size_bytes: int | None = flag(
        None,
        POSITIVE,
        "how much the copies of repositories elsewhere may take in --cache-directory (default: all but a tenth of its"
        " disk)",
    )
    concurrent_loads: int = flag(4, POSITIVE, "models that load beside each other", name="model-load-thread-count")
    strict_model_config: bool = flag(
        False,
        BOOLEAN,
        "complete no configuration from the model's file",
        aliases=("strict-model-config",),
        name="disable-auto-complete-config",
    )
    model_config_name: str = flag(
        "", text("NAME"), "of models that have a configs/NAME.pbtxt, read that instead of config.pbtxt"
    )
    model_namespacing: bool = flag(False, BOOLEAN, "let models of different repositories have the same name")
    allow_remote_files: bool = flag(False, BOOLEAN, "let load requests bring a model's files, in explicit mode")
    allow_remote_models: bool = flag(
        False, BOOLEAN, "let load requests with files name models that are in no repository"
    )
    allow_amd_endpoints: bool | None = flag(
        None, BOOLEAN, "let clients have files of the repositories served by worker_load (default: in explicit mode)"
    )
    max_amd_endpoints: int = flag(
        64, POSITIVE, "what worker_load may serve at once, counted with each further instance"
    )
    max_model_instances: int | None = flag(
        None, POSITIVE, "instances that a model may have (default 8 for each CPU, or 64 for each GPU that it is on)"
    )
    max_model_versions: int = flag(128, POSITIVE, "versions of a model served at once")
    max_folder_entries: int = flag(100_000, POSITIVE, "files and folders that a model's folder may hold")
    worker_load_folders: tuple[Path, ...] = repeated(
        FOLDER, "a folder whose files clients may have served by worker_load", name="allow-worker-load"
    )
    readiness: ReadinessRule = flag(
        ReadinessRule.KEPT,
        Kind("true|false|always", readiness_rule, alone="true"),
        "true: ready once what was there at the start serves, whatever new models do; false: once its loads have"
        " ended; always: only while every model serves, as Triton",
        group="server",
        name="strict-readiness",
    )
    remotes: tuple[RemotePlace, ...] = ()
    """Whose copies are among the roots."""
    single: SingleModel | None = None
    """The one model that there is, in the one root; None = the roots are repositories."""
    loaded_before: tuple[str, ...] | None = None
    """What the server had loaded under explicit control whose place this one takes. It is loaded instead of
    `load_models`, which are pinned with residency, whoever has asked for others."""
    may_lack_models: bool = False
    """Those that are not there any more are missed by nobody."""
    ends_on_failure: bool = False
    """The server ends when a model fails as it starts, so that no such load is tried again."""
    long_load_seconds: float = 10.0
    """A load that compiles, and has lasted so long, is no longer counted among the concurrent ones."""
    retry_seconds: float = 1.0
    """The pause before a failed load is tried again; doubled at each failure."""
    longest_retry_seconds: float = 300.0
