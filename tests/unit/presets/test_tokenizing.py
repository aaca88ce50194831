"""The arrays that the generated tokenizer makes of texts."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.text_encoders import SENTENCES, write_tokenizer

pytest.importorskip("tokenizers", reason="needs the package tokenizers")

NAMES = {"ids": "I", "mask": "M", "types": "T", "positions": "P"}
DATATYPES = {"TYPE_INT64": np.int64, "TYPE_INT32": np.int32}


@pytest.fixture
def tokenizing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with requests that are dicts of arrays, and responses that are dicts too."""
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "set by the model, and restored for other tests")
    utilities = SimpleNamespace(
        triton_string_to_numpy=DATATYPES.__getitem__,
        get_input_tensor_by_name=lambda request, name: request.get(name),
        Tensor=lambda name, array: (name, array),
        InferenceResponse=dict,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utilities)
    monkeypatch.delitem(sys.modules, "rocserve.presets.tokenizing", raising=False)
    yield importlib.import_module("rocserve.presets.tokenizing")
    sys.modules.pop("rocserve.presets.tokenizing", None)


def model_of(tokenizing: Any, folder: Path, datatype: str, parameters: Mapping[str, str]) -> Any:
    written = {f"{role}_output": name for role, name in NAMES.items()} | {"padding": "7"} | parameters
    config = {
        "input": [{"name": "TEXT"}, {"name": "IDS"}],
        "output": [{"name": name, "data_type": datatype} for name in NAMES.values()],
        "parameters": {key: {"string_value": value} for key, value in written.items()},
    }
    model = tokenizing.TritonPythonModel()
    place = {"model_repository": str(folder.parent), "model_version": folder.name}
    model.initialize({**place, "model_config": json.dumps(config)})
    return model


def request_of(name: str, values: Any) -> dict[str, Any]:
    return {name: SimpleNamespace(as_numpy=lambda: values)}


def filled(rows: Sequence[Sequence[int]], width: int, value: int, datatype: str) -> np.ndarray[Any, Any]:
    return np.array([[*row, *[value] * (width - len(row))] for row in rows], DATATYPES[datatype])


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("length", [0, 20])
@pytest.mark.parametrize("texts", [SENTENCES[:1], [SENTENCES[0]] * 3, SENTENCES])
def test_rows_are_filled_up_to_the_longest_or_to_the_encoders_length(
    tokenizing: Any, tmp_path: Path, texts: Sequence[str], length: int, datatype: str
) -> None:
    tokenizer = write_tokenizer(tmp_path)
    parameters = {"max_tokens": "20", **({"length": str(length)} if length else {})}
    model = model_of(tokenizing, tmp_path, datatype, parameters)
    tokenizer.enable_truncation(20)
    rows = [tokenizer.encode(text).ids for text in texts]
    width = length or max(map(len, rows))
    ones, zeros = [[1] * len(row) for row in rows], [[0] * len(row) for row in rows]
    expected = {
        "I": filled(rows, width, 7, datatype),
        "M": filled(ones, width, 0, datatype),
        "T": filled(zeros, width, 0, datatype),
        "P": np.array([range(width)] * len(rows), DATATYPES[datatype]),
        "TOKEN_COUNT": np.array([[len(row)] for row in rows], np.int32),
    }
    requests = [request_of("TEXT", np.array([[text.encode()] for text in texts], object))]
    if len({*map(len, rows)}) == 1:
        requests.append(request_of("IDS", np.array(rows)))
    for answer in model.execute(requests):
        assert answer.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(answer[name], array)
            assert answer[name].dtype == array.dtype
