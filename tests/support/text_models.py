"""Python models with the signatures of models of text, whose answers a test works out itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.models import drop

WIDTH = 4

_MODEL = """
import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def vector_of_text(text):
    return [len(text), ord(text[0]), ord(text[-1]), text.count("a")]


def vector_of_ids(ids):
    return [len(ids), ids[0], ids[-1], 0]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.batches = config["max_batch_size"] > 0
        self.counts = any(output["name"] == "TOKEN_COUNT" for output in config["output"])
        self.folder = Path(config["parameters"]["folder"]["string_value"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {name: pb_utils.get_input_tensor_by_name(request, name) for name in ("TEXT", "IDS", "QUERY")}
        if given["IDS"] is not None:
            ids = given["IDS"].as_numpy()
            rows = ids if self.batches else ids[None]
            vectors, counts = [vector_of_ids(row) for row in rows], [len(row) for row in rows]
        else:
            texts = [text.decode() for text in given["TEXT"].as_numpy().reshape(-1)]
            if "fail" in texts:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no tokens in /etc/secret/{texts[0]}"))
            if "wait" in texts:
                self.wait(request)
            vectors, counts = [vector_of_text(text) for text in texts], [len(text.split()) for text in texts]
            if "nan" in texts:
                vectors[texts.index("nan")][0] = float("nan")
        outputs = {"TOKEN_COUNT": np.array(counts, np.int32)[:, None]} if self.counts else {}
        if given["QUERY"] is None:
            outputs["EMBEDDING"] = np.array(vectors, np.float32)
        else:
            queries = [set(query.decode().split()) for query in given["QUERY"].as_numpy().reshape(-1)]
            scores = [len(query & set(text.split())) for query, text in zip(queries, texts)]
            outputs["SCORE"] = np.array(scores, np.float32)[:, None]
        tensors = [
            pb_utils.Tensor(name, array if self.batches else array[0])
            for name, array in outputs.items()
            if name in request.requested_output_names()
        ]
        (self.folder / "rows").open("a").write(f"{len(counts)} ")
        return pb_utils.InferenceResponse(tensors)

    def wait(self, request):
        (self.folder / "begun").touch()
        while not (self.folder / "open").exists():
            if request.is_cancelled():
                (self.folder / "cancelled").touch()
                return
            time.sleep(0.01)
"""

_INPUTS = {
    "TEXT": 'input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }\n',
    "TEXT or IDS": """input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] optional: true }
input { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
""",
    "QUERY": """input { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
""",
}


def drop_text_model(
    repository: Path,
    name: str,
    inputs: str = "TEXT",
    rows: int = 0,
    counts: bool = True,
    more: str = "",
    before: str = "",
) -> Path:
    """Write a model. `inputs`: "TEXT", "TEXT or IDS" or "QUERY". Returns the folder in which it notes the rows of each
    request ("rows"), that a request with the text "wait" has begun ("begun") or was cancelled ("cancelled"); such a
    request ends when the folder has a file "open". `before`: code that runs when the model is loaded."""
    folder = repository.parent / f"{name}-notes"
    folder.mkdir()
    folder.chmod(0o777)  # A server that is root runs models as another user.
    output = (
        '"SCORE" data_type: TYPE_FP32 dims: [ 1 ]'
        if inputs == "QUERY"
        else (f'"EMBEDDING" data_type: TYPE_FP32 dims: [ {WIDTH} ]')
    )
    config = f"""
backend: "python"
max_batch_size: {rows}
{_INPUTS[inputs]}
output {{ name: {output} }}
{'output { name: "TOKEN_COUNT" data_type: TYPE_INT32 dims: [ 1 ] }' if counts else ""}
parameters {{ key: "folder" value {{ string_value: "{folder}" }} }}
{more}
"""
    drop(repository, name, before + _MODEL, config)
    return folder


def vector_of(text: str) -> list[float]:
    """What the models give for a text."""
    return [float(len(text)), float(ord(text[0])), float(ord(text[-1])), float(text.count("a"))]


def cut(vector: list[float], length: int) -> list[float]:
    part = np.array(vector[:length], np.float32)
    return (part / np.linalg.norm(part)).tolist()
