"""The model repository of the comparisons: Python models and ensembles, which both servers run from the same files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "data" / "parity-models"

DATATYPES = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
)
LABELS = ("apple", "pear", "plum")


@dataclass(frozen=True, slots=True)
class ParityModel:
    """A model of the repository."""

    name: str
    config: str
    script: str = ""
    """The stem of a file of tests/data/parity-models; empty for an ensemble."""
    versions: Sequence[str] = ("1",)


def tensor(kind: str, name: str, data_type: str, dims: Sequence[int] = (), more: str = "") -> str:
    """A tensor's entry in a configuration. `kind` is `input` or `output`."""
    return f'{kind} {{ name: "{name}" data_type: TYPE_{data_type} dims: {list(dims)} {more} }}\n'


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], version: int = -1) -> str:
    """A step of an ensemble: maps from the member's tensors to the ensemble's."""
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}\n'


def ensemble(tensors: str, *steps: str, max_batch_size: int = 8) -> str:
    return (
        f'platform: "ensemble"\nmax_batch_size: {max_batch_size}\n{tensors}ensemble_scheduling {{ {"".join(steps)} }}\n'
    )


def python(tensors: str, max_batch_size: int = 8, more: str = "") -> str:
    return f'backend: "python"\nmax_batch_size: {max_batch_size}\n{tensors}{more}'


def write_model(repository: Path, model: ParityModel) -> Path:
    """Write a model's folder; return it."""
    folder = repository / model.name
    folder.mkdir()
    (folder / "config.pbtxt").write_text(model.config)
    for version in model.versions:
        (folder / version).mkdir()
        if model.script:
            shutil.copy(SCRIPTS / f"{model.script}.py", folder / version / "model.py")
    if "labels.txt" in model.config:
        (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    return folder


def write_models(repository: Path) -> None:
    for model in parity_models():
        write_model(repository, model)


def add_sub_tensors(dims: Sequence[int] = (4,), more: str = "") -> str:
    inputs = [tensor("input", f"INPUT{index}", "INT32", dims, more) for index in (0, 1)]
    return "".join(inputs + [tensor("output", f"OUTPUT{index}", "INT32", dims) for index in (0, 1)])


def parity_models() -> list[ParityModel]:
    """All models that are loaded at the start."""
    return [*_identities(), *_plain_models(), *_faulty_models(), *_ensembles()]


def _identities() -> list[ParityModel]:
    def tensors(more: str) -> str:
        entries = []
        for datatype in DATATYPES:
            data_type = "STRING" if datatype == "BYTES" else datatype
            entries.append(tensor("input", f"INPUT_{datatype}", data_type, [-1], "optional: true"))
            entries.append(tensor("output", f"OUTPUT_{datatype}", data_type, [-1], more))
        return "".join(entries)

    labels = 'label_filename: "labels.txt"'
    return [
        ParityModel("types", python(tensors(labels)), "identity"),
        ParityModel("types_whole", python(tensors(labels), max_batch_size=0), "identity"),
    ]


def _plain_models() -> list[ParityModel]:
    add_sub = add_sub_tensors()
    reshaped = (
        tensor("input", "INPUT_A", "FP32", [4], "reshape: { shape: [2, 2] }")
        + tensor("output", "OUTPUT_A", "FP32", [4], "reshape: { shape: [2, 2] }")
        + tensor("output", "SHAPE_A", "INT64", [-1])
        + tensor("input", "INPUT_B", "FP32", [1], "reshape: { shape: [] }")
        + tensor("output", "OUTPUT_B", "FP32", [1], "reshape: { shape: [] }")
        + tensor("output", "SHAPE_B", "INT64", [-1])
        + tensor("input", "INPUT_C", "FP32", [-1, 2, -1], "reshape: { shape: [-1, 1, 2, -1] } optional: true")
        + tensor("output", "OUTPUT_C", "FP32", [-1, 2, -1], "reshape: { shape: [-1, 1, 2, -1] }")
        + tensor("output", "SHAPE_C", "INT64", [-1])
    )
    seen = tensor("input", "IN", "FP32", [-1], "optional: true") + tensor("output", "SEEN", "STRING", [1])
    repeat = tensor("input", "IN", "INT32", [1]) + tensor("output", "OUT", "INT32", [1])
    repeat_text = (
        tensor("input", "TEXT", "STRING", [1])
        + tensor("input", "COUNT", "INT32", [1])
        + tensor("output", "OUT", "STRING", [1])
    )
    raw = tensor("input", "INPUT", "INT32", [-1]) + tensor("output", "OUTPUT", "INT32", [-1])
    decoupled = "model_transaction_policy { decoupled: true }\n"
    return [
        ParityModel("add_sub", python(add_sub), "add_sub"),
        ParityModel("add_sub_whole", python(add_sub_tensors([2, 4]), 0), "add_sub"),
        ParityModel("add_sub_any", python(add_sub_tensors([-1, 2]), 4), "add_sub"),
        ParityModel("optional", python(add_sub_tensors(more="optional: true"), 4), "add_sub"),
        ParityModel("batched", python(add_sub, more="dynamic_batching { }\n"), "add_sub"),
        ParityModel("counted", python(add_sub), "add_sub"),
        ParityModel("reshaped", python(reshaped), "shapes"),
        ParityModel("seen", python(seen, 0), "seen"),
        ParityModel(
            "versions", python(seen, 0, "version_policy { specific { versions: [1, 3] } }\n"), "seen", ("1", "2", "3")
        ),
        ParityModel(
            "idle", python(seen, 0, "version_policy { specific { versions: [1, 3] } }\n"), "seen", ("1", "2", "3")
        ),
        ParityModel(
            "latest", python(seen, 0, "version_policy { latest { num_versions: 2 } }\n"), "seen", ("1", "7", "10")
        ),
        ParityModel("repeat", python(repeat, 0, decoupled), "repeat"),
        ParityModel("repeat_text", python(repeat_text, 0, decoupled), "repeat_text"),
        ParityModel("raw", python(raw, 0), "identity"),
    ]


def _faulty_models() -> list[ParityModel]:
    faults = tensor("input", "MODE", "STRING", [1]) + tensor("output", "OUT", "FP32", [1])
    return [ParityModel("faults", python(faults, 0), "faults")]


def _ensembles() -> list[ParityModel]:
    both = add_sub_tensors()
    again = step("add_sub", {"INPUT0": "sum", "INPUT1": "INPUT1"}, {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"})
    first = step("add_sub", {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}, {"OUTPUT0": "sum"})
    labelled = tensor("input", "IN", "FP32", [-1]) + tensor("output", "OUT", "FP32", [-1])
    faulty = tensor("input", "MODE", "STRING", [1]) + tensor("output", "OUT", "FP32", [1])
    return [
        ParityModel("chain", ensemble(both, first, again)),
        ParityModel("labelled", ensemble(labelled, step("types", {"INPUT_FP32": "IN"}, {"OUTPUT_FP32": "OUT"}))),
        ParityModel(
            "faulty_chain", ensemble(faulty, step("faults", {"MODE": "MODE"}, {"OUT": "OUT"}), max_batch_size=0)
        ),
        ParityModel(
            "seen_chain",
            ensemble(
                tensor("input", "IN", "FP32", [-1]) + tensor("output", "SEEN", "STRING", [1]),
                step("seen", {"IN": "IN"}, {"SEEN": "SEEN"}),
                max_batch_size=0,
            ),
        ),
    ]
