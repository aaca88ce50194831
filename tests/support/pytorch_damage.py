"""Loads damaged files, each in a separate process, and counts the outcomes: `... FILES PACKAGES SCRATCH COUNT`. served:
right values; refused: a ServeError; wrong: served with wrong values; failed: another exception; crashed: killed by a
signal; hung: took longer than any load should."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import pickle
import random
import resource
import signal
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.pytorch import eager
from rocserve.backends.pytorch.model_file import file_kind
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig
from rocserve.core.tensors import tensor_from_numpy

MEMBERS_OF = 4
"""Percentage of files in which a member is replaced, with a right checksum, so that PyTorch must find the damage."""
CPU_SECONDS = 30
MEMORY_BYTES = 16 << 30
BOMB_BYTES = 1 << 26
"""Size of the zeros that one file unpacks to."""
ROUNDING = 1e-6
"""The largest difference from PyTorch's own outputs that is mere rounding in compiled code."""
READERS = ("torch.export.pt2_archive", "torch.export._trace", "torch._inductor.package", "torch.utils.cpp_extension")
"""Modules that loading a file imports. They take 1.6 s, so they are imported once here instead of in each child."""
NAMES = ("INPUT__0", "INPUT__1", "INPUT__2", "INPUT__3")
OUTCOMES = ("served", "refused", "wrong", "failed")


def truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def with_other_member(content: bytes, chance: random.Random) -> bytes:
    """Replace a member: cut, empty, noise, another member, or removed."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(written, "w") as target:
        names = source.namelist()
        chosen = chance.choice(names)
        for name in names:
            data = source.read(name)
            if name == chosen:
                others = (
                    truncated(data or b"-", chance),
                    b"",
                    chance.randbytes(len(data)),
                    flipped(data or b"-", chance),
                )
                kind = chance.randrange(6)
                if kind == 5:
                    continue
                data = source.read(chance.choice(names)) if kind == 4 else others[kind]
            target.writestr(name, data)
    return written.getvalue()


class Touch:
    """An object whose pickle makes a file, if the unpickler calls the functions that a pickle names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def hostile(files: Path, touched: Path) -> Iterator[bytes]:
    """Files whose pickles call a command, and a small file that unpacks to more than `BOMB_BYTES`."""
    command = pickle.dumps(Touch(touched), protocol=2)
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        for name, data in (("data.pkl", command), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", data)
    yield command
    for name, member, data in (
        ("classifier.pt2", "classifier/data/sample_inputs/model.pt", saved.getvalue()),
        ("classifier.pt2", "classifier/data/weights/weight_0", bytes(BOMB_BYTES)),
        ("traced.pt", "traced/constants.pkl", command),
        ("traced.pt", "traced/data.pkl", command),
    ):
        written = io.BytesIO()
        with (
            zipfile.ZipFile(files / name) as source,
            zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED if len(data) == BOMB_BYTES else 0) as target,
        ):
            for other in source.namelist():
                target.writestr(other, data if other == member else source.read(other))
        yield written.getvalue()


def is_refused(file: Path) -> bool:
    """Whether the check of the archive, before PyTorch is involved, refuses the file."""
    try:
        file_kind(file)
    except ServeError:
        return True
    return False


def outcome(file: Path, given: Sequence[np.ndarray], expected: np.ndarray, rounding: float) -> str:
    tensors = {name: tensor_from_numpy(name, array) for name, array in zip(NAMES, given, strict=False)}
    dims = [(-1,) if rounding else array.shape[1:] for array in given]
    inputs = tuple(
        InputConfig(name, tensor.datatype, own) for (name, tensor), own in zip(tensors.items(), dims, strict=True)
    )
    # The load check of a package imports PyTorch in one more process, and says nothing about values.
    checks = {"load_check": "off"} if rounding else {}
    config = ModelConfig(name="m", max_batch_size=8, inputs=inputs, parameters=checks)
    source = ModelSource("m", 1, file.parent, file.parent, file, config, InstanceKind.CPU, None, 1)
    try:
        model = eager.load(source)
        names = [spec.name for spec in model.signature.outputs]
        # A package does not name its outputs.
        scores = "scores" if "scores" in names else names[0]
        result = model.execute(Batch(tensors, (scores,), (len(expected),)))
    except ServeError:
        return "refused"
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:200], file=sys.stderr)
        return "failed"
    return "served" if np.allclose(np.asarray(result.outputs[scores]), expected, rtol=0, atol=rounding) else "wrong"


def ended(file: Path, given: Sequence[np.ndarray], expected: np.ndarray, rounding: float = 0.0) -> str:
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os._exit(OUTCOMES.index(outcome(file, given, expected, rounding)))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return OUTCOMES[status] if status >= 0 else "hung" if -status == signal.SIGXCPU else "crashed"


def main(files: Path, packages: Path, scratch: Path, count: int) -> None:
    """`packages`: the folder with the encoders' package; "-" = none."""
    warnings.simplefilter("ignore")
    logging.disable()
    for name in READERS:
        importlib.import_module(name)
    with np.load(files / "classifier.npz") as values:
        x, expected = [values["in:x"]], values["out:scores"]
    undamaged = [((files / name).read_bytes(), x, expected, 0.0) for name in ("classifier.pt2", "traced.pt")]
    if packages != Path("-"):
        with np.load(files / "encoders.npz") as values:
            texts = [values[name] for name in values if name.startswith("in:")]
            undamaged.append(((packages / "encoders.pt2").read_bytes(), texts, values["out:states"], ROUNDING))
    counts: Counter[str] = Counter()
    touched = scratch / "touched"
    for content in hostile(files, touched):
        file = scratch / "model.pt2"
        file.write_bytes(content)
        counts["hostile refused" if is_refused(file) else f"hostile {ended(file, x, expected)}"] += 1
        counts["hostile obeyed"] += touched.exists()
    for seed in range(count):
        chance = random.Random(seed)
        is_member = seed % 100 < MEMBERS_OF
        damage: Callable[[bytes, random.Random], bytes] = chance.choice((truncated, flipped))
        file = scratch / "model.pt2"
        content, *asked = undamaged[seed % len(undamaged)]
        file.write_bytes((with_other_member if is_member else damage)(content, chance))
        if is_refused(file):
            counts["member refused" if is_member else "refused"] += 1
            continue
        end = ended(file, *asked)
        counts[f"member {end}" if is_member else end] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
