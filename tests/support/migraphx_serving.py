"""Drops models for MIGraphX's reference target, and asks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import tritonclient.grpc as triton

from support.infer_inputs import infer_input
from support.migraphx import run_with_migraphx
from support.migraphx_models import shapes_at
from support.models import drop
from support.waiting import wait_until

Array = np.ndarray[Any, Any]

_COMPILE = """
import json, sys
from pathlib import Path
from rocserve.backends.migraphx.binding import DimensionRange
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.backends.migraphx.installation import find_installation
from rocserve.settings import EngineSettings

root, *folders = sys.argv[1:]
binding = open_binding(find_installation(EngineSettings(migraphx_root=root)))
for folder in map(Path, folders):
    parsed = binding.parse_onnx(folder / "source.onnx", {
        name: tuple(size if isinstance(size, int) else DimensionRange(*size) for size in shape)
        for name, shape in json.loads((folder / "shapes.json").read_text()).items()
    })
    parsed.compile("ref")
    parsed.save(folder / "program.mxr")
"""


def config(max_batch_size: int = 0, platform: str = "onnx_onnxv1", tensors: str = "", **parameters: object) -> str:
    """A config.pbtxt that asks for MIGraphX's reference target."""
    lines = [f'platform: "{platform}"']
    if max_batch_size:
        lines.append(f"max_batch_size: {max_batch_size}")
    for name, value in {"engine": "migraphx", "target": "ref", **parameters}.items():
        lines.append(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}')
    return "\n".join([*lines, tensors])


def place(repository: Path, name: str, filename: str, content: bytes, text: str) -> Path:
    """Drop a model with its configuration; return its folder."""
    return drop(repository, name, content, text, filename=filename)


def compiled(root: Path, model: bytes, folder: Path, batch: int | tuple[int, int] = 1) -> bytes:
    """Compile an ONNX model to an .mxr, with symbolic batches set to `batch`; two numbers = a range."""
    (program,) = compiled_together(root, folder, (model, batch))
    return program


def compiled_together(root: Path, folder: Path, *models: tuple[bytes, int | tuple[int, int]]) -> list[bytes]:
    """Compile models in one process, each with its batch."""
    folders = [folder / str(number) for number in range(len(models))]
    for own, (model, batch) in zip(folders, models, strict=True):
        own.mkdir()
        (own / "source.onnx").write_bytes(model)
        (own / "shapes.json").write_text(json.dumps(shapes_at(model, batch)))
    done = run_with_migraphx(root, _COMPILE, str(root), *map(str, folders))
    assert done.returncode == 0, done.stderr
    return [(own / "program.mxr").read_bytes() for own in folders]


def expected(model: bytes, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run the model on ONNX Runtime."""
    session = onnxruntime.InferenceSession(model)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def ask(client: triton.InferenceServerClient, model: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Send a request; return all outputs."""
    entries = []
    for name, array in inputs.items():
        entry = infer_input(name, array)
        entries.append(entry)
    result = client.infer(model, entries)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def index_entry(client: triton.InferenceServerClient, model: str) -> tuple[str, str]:
    """State and reason in the repository index; empty while the model is not in it."""
    for entry in client.get_model_repository_index().models:
        if entry.name == model:
            return entry.state, entry.reason
    return "", ""


def wait_for_end(client: triton.InferenceServerClient, model: str, *states: str) -> tuple[str, str]:
    """Wait until the model is in one of the states; return state and reason, read together: the server may retry
    soon."""
    seen: list[tuple[str, str]] = []

    def has_ended() -> bool:
        seen.append(index_entry(client, model))
        return seen[-1][0] in states

    wait_until(has_ended, f"state {' or '.join(states)} of '{model}'")
    return seen[-1]


def wait_for_state(client: triton.InferenceServerClient, model: str, state: str) -> str:
    """Wait until the model is in this state; return the reason."""
    return wait_for_end(client, model, state)[1]
