"""Advice on misplaced files: finds unread model files and configurations, and names the repairing commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from rocserve.config.model_folder import CONFIG_FILENAME, TOML_FILENAME, is_version_name


def model_filename(file: str, known: Sequence[str]) -> str:
    """Return the name of a model file in a version folder; "" = not a model file. `known`: the backends' file names."""
    name = PurePosixPath(file).name
    if name in known:
        return name
    suffix = PurePosixPath(name).suffix
    # Many other files have these endings too; such a file is a model only under its full name.
    is_common = suffix in ("", ".py", ".json", ".pb")
    fitting = () if is_common else [one for one in known if PurePosixPath(one).suffix == suffix]
    return next(iter(fitting), "")


def advice_on_stray(file: Path, filename: str) -> str:
    """Return advice on a model file directly in a repository. `filename`: its name in a version folder."""
    return f"'{file}' is not served: each model has a folder; {_move(file.parent / file.stem, 1, (file,), filename)}"


def advice_on_folder(
    folder: Path, paths: Collection[str], versions: Collection[int], known: Sequence[str]
) -> tuple[str, ...]:
    """Return advice on a model's folder. `paths`: its files, relative to it. `known`: the backends' file names."""
    found = [
        _of_another_model(folder, version, paths, known) or _in_version(folder, version, paths, known)
        for version in versions
    ]
    if not versions:
        found.append(_without_versions(folder, paths, known))
    elif not any(is_version_name(path.split("/", 1)[0]) for path in paths):
        found.append(_beside_version(folder, max(versions), paths, known))
    if CONFIG_FILENAME not in paths and TOML_FILENAME not in paths:
        found += [
            f"'{folder / name}' is not read; a model's configuration is config.pbtxt, or none at all"
            for name in ("config.yaml", "config.yml", "config.json")
            if name in paths
        ]
    return tuple(text for text in found if text)


def _of_another_model(folder: Path, version: int, paths: Collection[str], known: Sequence[str]) -> str:
    """Return advice if the version seems to be another model: storage that copies by a prefix of names, as KServe's
    does, makes models/m2/... the version 2 of models/m if the URI lacks its last slash."""
    own = f"{version}/"
    inside = [path.removeprefix(own) for path in paths if path.startswith(own)]
    whole = [path for path in inside if is_version_name(path.partition("/")[0]) and model_filename(path, known)]
    if whole and CONFIG_FILENAME in inside:
        what = f"'{folder / own}' is a whole model (config.pbtxt, {min(whole)}), not a version of '{folder.name}'"
    elif (beside := [path for path in paths if path in known]) and not whole and inside:
        what = f"'{folder / min(beside)}' is not served, because version folder {version} lies beside it"
    else:
        return ""
    return (
        f"{what}; if it is model '{folder.name}{version}', copied from a store, end the URI of '{folder.name}' with '/'"
    )


def _in_version(folder: Path, version: int, paths: Collection[str], known: Sequence[str]) -> str:
    own = f"{version}/"
    inside = [path for path in paths if path.startswith(own)]
    if any(path.count("/") == 1 for path in inside):
        return ""
    deeper = [path for path in inside if path.count("/") == 2 and model_filename(path, known)]
    if len(deeper) != 1:
        return ""
    inner = folder / deeper[0]
    what = f"the model file of '{folder.name}' is one folder too deep, at '{inner}'"
    return f"{what}; repair it with: mv {_quoted(inner.parent)}/* {_quoted(folder / own)}/"


def _beside_version(folder: Path, version: int, paths: Collection[str], known: Sequence[str]) -> str:
    path = min((path for path in paths if "/" not in path and model_filename(path, known)), default="")
    if not path:
        return ""
    what = f"the version folders of '{folder.name}' are empty, and its model lies at '{folder / path}'"
    return f"{what}; {_move(folder, version, _with_weights(folder, path, paths), model_filename(path, known))}"


def _without_versions(folder: Path, paths: Collection[str], known: Sequence[str]) -> str:
    models = {path: filename for path in paths if (filename := model_filename(path, known))}
    if not models:
        if "config.json" in paths and any(path.endswith((".safetensors", "pytorch_model.bin")) for path in paths):
            return (
                f"'{folder}' is a Hugging Face folder without a model that is served; export it with:"
                f" optimum-cli export onnx --model {_quoted(folder)} {_quoted(folder / '1')}"
            )
        return ""
    path = min(models, key=lambda one: (one.count("/"), one))
    top, *rest = path.split("/")
    what = f"'{folder}' has no version folder (1, 2, ...), and its model lies at '{folder / path}'"
    lettered = re.fullmatch(r"[vV]0*(\d+)", top)
    if rest and lettered:
        return f"{what}; repair it with: mv {_quoted(folder / top)} {_quoted(folder / lettered[1])}"
    if len(rest) > 1 and is_version_name(rest[0]):
        move = f"mv -T {_quoted(folder / top)} {_quoted(folder.parent / top)}"
        return f"{what}, one folder too deep; repair it with: {move}"
    return f"{what}; {_move(folder, 1, _with_weights(folder, path, paths), models[path])}"


def _with_weights(folder: Path, path: str, paths: Collection[str]) -> list[Path]:
    """Return the model's file and its weights, which must move together under their names."""
    weights = sorted(one for one in paths if one.startswith(path) and one != path)
    return [folder / one for one in (path, *weights)]


def _move(folder: Path, version: int, files: Sequence[Path], filename: str) -> str:
    place = _quoted(folder / str(version))
    model, *others = files
    commands = [f"mkdir -p {place}", f"mv {_quoted(model)} {place}/{filename}"]
    commands += [f"mv {_quoted(other)} {place}/" for other in others]
    return f"repair it with: {' && '.join(commands)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
