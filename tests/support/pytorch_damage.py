"""Loads damaged files, each in a process of its own, and prints how many ended how: `... FILES SCRATCH COUNT`.

served: it gives the right values; refused: a ServeError; wrong: served with other values; failed: another exception;
crashed: by a signal; hung: it took longer than a worker's load ever should.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import resource
import signal
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.pytorch import eager
from rocserve.backends.pytorch.model_file import file_kind
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig
from rocserve.core.tensors import tensor_from_numpy

MEMBERS_OF = 10
"""Of so many files in a hundred, a member is another one with a right checksum: PyTorch itself has to read that."""
CPU_SECONDS = 30
MEMORY_BYTES = 16 << 30
OUTCOMES = ("served", "refused", "wrong", "failed")


def truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def with_other_member(content: bytes, chance: random.Random) -> bytes:
    """Another member: cut, empty, noise, another's, or gone."""
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


def is_refused(file: Path) -> bool:
    """By its archive alone, which is looked at before PyTorch is."""
    try:
        file_kind(file)
    except ServeError:
        return True
    return False


def outcome(file: Path, x: np.ndarray, expected: np.ndarray) -> str:
    config = ModelConfig(name="m", max_batch_size=8, inputs=(InputConfig("x", DataType.FP32, (4,)),))
    source = ModelSource("m", 1, file.parent, file.parent, file, config, InstanceKind.CPU, None, 1)
    try:
        result = eager.load(source).execute(Batch({"x": tensor_from_numpy("x", x)}, ("scores",), (len(x),)))
    except ServeError:
        return "refused"
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:200], file=sys.stderr)
        return "failed"
    return "served" if np.array_equal(np.asarray(result.outputs["scores"]), expected) else "wrong"


def main(files: Path, scratch: Path, count: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    with np.load(files / "classifier.npz") as values:
        x, expected = values["in:x"], values["out:scores"]
    undamaged = [(files / name).read_bytes() for name in ("classifier.pt2", "traced.pt")]
    counts: Counter[str] = Counter()
    for seed in range(count):
        chance = random.Random(seed)
        is_member = seed % 100 < MEMBERS_OF
        damage: Callable[[bytes, random.Random], bytes] = chance.choice((truncated, flipped))
        file = scratch / "model.pt2"
        file.write_bytes((with_other_member if is_member else damage)(undamaged[seed % 2], chance))
        if is_refused(file):
            counts["member refused" if is_member else "refused"] += 1
            continue
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os._exit(OUTCOMES.index(outcome(file, x, expected)))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = OUTCOMES[status] if status >= 0 else "hung" if -status == signal.SIGXCPU else "crashed"
        counts[f"member {ended}" if is_member else ended] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
