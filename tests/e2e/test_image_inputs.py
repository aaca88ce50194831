"""Every form in which clients can send images, through the real server and Triton's client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support import pictures
from support.infer_inputs import infer_input
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

RESIZE = {"operation": "Resize", "dest_width": 32, "dest_height": 24, "is_output": True}
MIRROR = {
    "operation": "ResizeMirrorNormalize",
    "dest_width": 32,
    "dest_height": 24,
    "mean": [0],
    "std_dev": [1],
    "mirror": {"input": "MIRROR"},
    "is_output": True,
}
SIZE = {"operation": "ImageSize", "is_output": True}
# The limit is the images' own size, so the decoder does not scale PNGs and JPEGs.
DECODER = {"max_width": 60, "max_height": 40}
OUTPUT = "output { name: 'IMAGE' data_type: TYPE_UINT8 dims: [ 24, 32, 3 ] }"
MODELS: Mapping[str, tuple[dict[str, Any], str]] = {
    "one_file": (
        {"decoder": DECODER, "pipeline": [RESIZE]},
        f"input {{ name: 'FILE' data_type: TYPE_UINT8 dims: [ -1 ] }} {OUTPUT}",
    ),
    "files": (
        {"decoder": DECODER, "pipeline": [RESIZE]},
        f"max_batch_size: 8 dynamic_batching {{ max_queue_delay_microseconds: 20000 }}"
        f" input {{ name: 'FILES' data_type: TYPE_STRING dims: [ 1 ] }} {OUTPUT}",
    ),
    "padded_files": (
        {"decoder": DECODER, "pipeline": [RESIZE]},
        f"max_batch_size: 8 input {{ name: 'FILES' data_type: TYPE_UINT8 dims: [ -1 ] }} {OUTPUT}",
    ),
    "list_of_files": (
        {"decoder": DECODER, "pipeline": [RESIZE]},
        "input { name: 'FILES' data_type: TYPE_STRING dims: [ -1 ] }"
        " output { name: 'IMAGE' data_type: TYPE_UINT8 dims: [ -1, 24, 32, 3 ] }",
    ),
    "one_raw": (
        {"decoder": {"input": "raw"}, "pipeline": [RESIZE]},
        f"input {{ name: 'PIXELS' data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }} {OUTPUT}",
    ),
    "completed_raw": ({"decoder": {"input": "raw"}, "pipeline": [RESIZE]}, ""),
    "formats": (
        {
            "pipeline": [
                {**RESIZE, "layout": "NCHW", "name": "resized"},
                {"operation": "copy", "dtype": "FP16", "is_output": True},
                {"operation": "flip", "inputs": ["resized"], "horizontal": 1, "dtype": "FLOAT", "is_output": True},
            ]
        },
        "parameters { key: 'color_format' value { string_value: 'BGR24' } }",
    ),
    "completed": ({"decoder": {"exif": True}, "pipeline": [MIRROR, SIZE]}, ""),
}
FILES = [
    pictures.saved(pictures.colours(), "PNG"),
    pictures.jpeg(),
    pictures.jpeg(mode="CMYK"),
    pictures.jpeg(mode="L"),
    pictures.jpeg(progressive=True),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (pipeline, config) in MODELS.items():
        version: Path = repository / name / "1"
        version.mkdir(parents=True)
        (version / "pipeline.json").write_text(json.dumps(pipeline))
        (repository / name / "config.pbtxt").write_text(f"platform: 'rocal_json' {config}".replace("'", '"'))
    version = repository / "without_configuration" / "1"
    version.mkdir(parents=True)
    (version / "preprocessing.json").write_text(json.dumps({"decoder": DECODER, "pipeline": [RESIZE, SIZE]}))
    version = repository / "wrong" / "1"
    version.mkdir(parents=True)
    (version / "pipeline.json").write_text(json.dumps({"pipeline": [{**RESIZE, "dest_widht": 32}]}))
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RocserveProcess([repository], log=log) as running:
        good = (*MODELS, "without_configuration")
        client = running.client()
        wait_until(lambda: all(client.is_model_ready(name) for name in good), f"readiness of {good}")
        yield running


def objects(files: list[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(files), dtype=np.object_)
    array[:] = files
    return array


def sent(server: RocserveProcess, model: str, *inputs: triton.InferInput, output: str = "IMAGE") -> Any:
    return server.client().infer(model, list(inputs)).as_numpy(output)


@pytest.fixture(scope="module")
def expected(server: RocserveProcess) -> np.ndarray[Any, Any]:
    """The answers for the images of FILES, each sent alone."""
    return np.stack([sent(server, "one_file", infer_input("FILE", np.frombuffer(file, np.uint8))) for file in FILES])


def test_one_file_as_bytes(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    assert expected.shape == (5, 24, 32, 3)
    # The PNG and the JPEGs show the same picture.
    assert np.abs(expected[1].astype(int) - expected[0]).mean() < 3
    assert np.abs(expected[2].astype(int) - expected[0]).mean() < 3
    assert (expected[3][..., 0] == expected[3][..., 2]).all()
    assert np.abs(expected[4].astype(int) - expected[1]).mean() < 3


def test_strings_padded_rows_and_lists(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    files = objects(FILES)
    np.testing.assert_array_equal(sent(server, "files", infer_input("FILES", files.reshape(-1, 1))), expected)
    np.testing.assert_array_equal(sent(server, "list_of_files", infer_input("FILES", files)), expected)
    longest = max(map(len, FILES))
    rows = np.stack([np.frombuffer(file.ljust(longest + 100, b"\0"), np.uint8) for file in FILES])
    np.testing.assert_array_equal(sent(server, "padded_files", infer_input("FILES", rows)), expected)


def test_raw_pixels(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    pixels = pictures.colours()
    np.testing.assert_array_equal(sent(server, "one_raw", infer_input("PIXELS", pixels)), expected[0])
    metadata = server.client().get_model_metadata("completed_raw", as_json=True)
    assert metadata["inputs"] == [{"name": "pixels", "datatype": "UINT8", "shape": ["-1", "-1", "-1", "3"]}]
    rows = sent(server, "completed_raw", infer_input("pixels", np.stack([pixels, 255 - pixels])), output="image")
    np.testing.assert_array_equal(rows[0], expected[0])
    np.testing.assert_array_equal(rows[1], sent(server, "one_raw", infer_input("PIXELS", 255 - pixels)))


def test_values_for_each_image_and_sizes_of_each(server: RocserveProcess) -> None:
    metadata = server.client().get_model_metadata("completed", as_json=True)
    assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]] == [
        ("encoded", "BYTES", ["-1", "1"]),
        ("MIRROR", "BOOL", ["-1", "1"]),
    ]
    assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["outputs"]] == [
        ("image", "UINT8", ["-1", "24", "32", "3"]),
        ("image_1", "INT32", ["-1", "2"]),
    ]
    files = objects([FILES[0], FILES[0], pictures.turned_jpeg(8)]).reshape(-1, 1)
    flags = np.array([[False], [True], [False]])
    result = server.client().infer("completed", [infer_input("encoded", files), infer_input("MIRROR", flags)])
    rows = result.as_numpy("image")
    np.testing.assert_array_equal(rows[0][:, ::-1], rows[1])
    np.testing.assert_array_equal(result.as_numpy("image_1"), [[40, 60], [40, 60], [60, 40]])


def test_a_pipeline_alone_is_a_model(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    metadata = server.client().get_model_metadata("without_configuration", as_json=True)
    assert metadata["inputs"] == [{"name": "encoded", "datatype": "BYTES", "shape": ["-1", "1"]}]
    assert metadata["outputs"] == [
        {"name": "image", "datatype": "UINT8", "shape": ["-1", "24", "32", "3"]},
        {"name": "image_1", "datatype": "INT32", "shape": ["-1", "2"]},
    ]
    files = infer_input("encoded", objects(FILES).reshape(-1, 1))
    result = server.client().infer("without_configuration", [files])
    np.testing.assert_array_equal(result.as_numpy("image"), expected)
    np.testing.assert_array_equal(result.as_numpy("image_1"), [[40, 60]] * 5)
    wanted = [triton.InferRequestedOutput("image_1")]
    result = server.client().infer("without_configuration", [files], outputs=wanted)
    assert result.as_numpy("image") is None
    np.testing.assert_array_equal(result.as_numpy("image_1"), [[40, 60]] * 5)


def test_every_output_has_its_own_type_and_layout(server: RocserveProcess) -> None:
    metadata = server.client().get_model_metadata("formats", as_json=True)
    assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["outputs"]] == [
        ("image", "UINT8", ["-1", "3", "24", "32"]),
        ("image_1", "FP16", ["-1", "24", "32", "3"]),
        ("image_2", "FP32", ["-1", "24", "32", "3"]),
    ]
    result = server.client().infer("formats", [infer_input("encoded", objects(FILES[1:2]).reshape(1, 1))])
    image = result.as_numpy("image").transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(result.as_numpy("image_1"), image)
    np.testing.assert_array_equal(result.as_numpy("image_2"), image[:, :, ::-1])
    # Blue comes first: in this picture blue grows less where red grows more.
    assert image[0, 12, 0, 0] > image[0, 12, -1, 0]
    assert image[0, 12, 0, 2] < image[0, 12, -1, 2]


def test_the_index_shows_why_a_pipeline_is_wrong(server: RocserveProcess) -> None:
    def reason() -> str:
        models = server.client().get_model_repository_index(as_json=True)["models"]
        return next((model.get("reason", "") for model in models if model["name"] == "wrong"), "")

    expected = (
        "pipeline.json: pipeline[0] (Resize): unknown key 'dest_widht'; allowed are dest_height, dest_width, dtype,"
        ' inputs, is_output, layout, name, operation; did you mean "dest_width"?'
    )
    wait_until(lambda: expected in reason(), f"the reason {expected!r}")
    assert not server.client().is_model_ready("wrong")


def test_damaged_files_by_the_hundred_harm_no_other_request(
    server: RocserveProcess, expected: np.ndarray[Any, Any]
) -> None:
    random = np.random.default_rng(3)

    def executions() -> int:
        return int(server.client().get_inference_statistics("files").model_stats[0].execution_count)

    def ask(place: int) -> tuple[int | None, Any]:
        file = FILES[place % len(FILES)]
        good = place % 3 == 0
        if not good:
            start = int(damage[place] * len(file))
            file = file[:start] if place % 3 == 1 else file[:start] + b"\x13\x37" + file[start + 2 :]
        try:
            rows = sent(server, "files", infer_input("FILES", objects([file]).reshape(1, 1)))
        except InferenceServerException as error:
            assert not good, error
            assert error.status() == "StatusCode.INVALID_ARGUMENT"
            return None, error.message()
        return (place % len(FILES) if good else None), rows[0]

    damage = random.random(300)
    before = executions()
    rounds: list[list[tuple[int | None, Any]]] = []

    def were_batched() -> bool:
        """Several requests were batched, so the bad image had others to harm."""
        with ThreadPoolExecutor(16) as pool:
            rounds.append(list(pool.map(ask, range(300))))
        return executions() - before < 300 * len(rounds)

    wait_until(were_batched, "a batch of several requests")
    answers = rounds[-1]
    texts = [answer for _, answer in answers if isinstance(answer, str)]
    assert len(texts) > 100
    assert all(text.startswith("the image in input 'FILES' cannot be decoded: ") for text in texts)
    for which, answer in answers:
        if which is not None:
            np.testing.assert_array_equal(answer, expected[which])
