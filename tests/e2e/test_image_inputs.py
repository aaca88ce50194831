"""Every form in which images can be sent, through the real server and Triton's client."""

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
from support.server import RocserveProcess
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
# A limit of the images' own size: the decoder leaves PNGs and JPEGs as they are.
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
    "completed": ({"decoder": {"exif": True}, "pipeline": [MIRROR, SIZE]}, ""),
}
FILES = [
    pictures.saved(pictures.colours(), "PNG"),
    pictures.jpeg(),
    pictures.jpeg(mode="CMYK"),
    pictures.jpeg(mode="L"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (pipeline, config) in MODELS.items():
        version: Path = repository / name / "1"
        version.mkdir(parents=True)
        (version / "pipeline.json").write_text(json.dumps(pipeline))
        (repository / name / "config.pbtxt").write_text(f"platform: 'rocal_json' {config}".replace("'", '"'))
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RocserveProcess([repository], log=log) as running:
        running.wait_until_ready()
        yield running


def tensor(name: str, datatype: str, array: np.ndarray[Any, Any]) -> triton.InferInput:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def objects(files: list[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(files), dtype=np.object_)
    array[:] = files
    return array


def sent(server: RocserveProcess, model: str, *inputs: triton.InferInput, output: str = "IMAGE") -> Any:
    return server.client().infer(model, list(inputs)).as_numpy(output)


@pytest.fixture(scope="module")
def expected(server: RocserveProcess) -> np.ndarray[Any, Any]:
    """The images of FILES, each sent by itself."""
    return np.stack(
        [sent(server, "one_file", tensor("FILE", "UINT8", np.frombuffer(file, np.uint8))) for file in FILES]
    )


def test_one_file_as_bytes(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    assert expected.shape == (4, 24, 32, 3)
    # The PNG and the JPEGs show the same picture.
    assert np.abs(expected[1].astype(int) - expected[0]).mean() < 3
    assert np.abs(expected[2].astype(int) - expected[0]).mean() < 3
    assert (expected[3][..., 0] == expected[3][..., 2]).all()


def test_strings_padded_rows_and_lists(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    files = objects(FILES)
    np.testing.assert_array_equal(sent(server, "files", tensor("FILES", "BYTES", files.reshape(-1, 1))), expected)
    np.testing.assert_array_equal(sent(server, "list_of_files", tensor("FILES", "BYTES", files)), expected)
    longest = max(map(len, FILES))
    rows = np.stack([np.frombuffer(file.ljust(longest + 100, b"\0"), np.uint8) for file in FILES])
    np.testing.assert_array_equal(sent(server, "padded_files", tensor("FILES", "UINT8", rows)), expected)


def test_raw_pixels(server: RocserveProcess, expected: np.ndarray[Any, Any]) -> None:
    pixels = pictures.colours()
    np.testing.assert_array_equal(sent(server, "one_raw", tensor("PIXELS", "UINT8", pixels)), expected[0])
    metadata = server.client().get_model_metadata("completed_raw", as_json=True)
    assert metadata["inputs"] == [{"name": "pixels", "datatype": "UINT8", "shape": ["-1", "-1", "-1", "3"]}]
    rows = sent(server, "completed_raw", tensor("pixels", "UINT8", np.stack([pixels, 255 - pixels])), output="image")
    np.testing.assert_array_equal(rows[0], expected[0])


def test_values_for_each_image_and_sizes_of_each(server: RocserveProcess) -> None:
    metadata = server.client().get_model_metadata("completed", as_json=True)
    assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]] == [
        ("encoded", "BYTES", ["-1", "1"]),
        ("MIRROR", "BOOL", ["-1", "1"]),
    ]
    assert [one["name"] for one in metadata["outputs"]] == ["image", "image_1"]
    files = objects([FILES[0], FILES[0], pictures.turned_jpeg(8)]).reshape(-1, 1)
    flags = np.array([[False], [True], [False]])
    result = server.client().infer("completed", [tensor("encoded", "BYTES", files), tensor("MIRROR", "BOOL", flags)])
    rows = result.as_numpy("image")
    np.testing.assert_array_equal(rows[0][:, ::-1], rows[1])
    np.testing.assert_array_equal(result.as_numpy("image_1"), [[40, 60], [40, 60], [60, 40]])


def test_a_bad_image_fails_its_own_request_and_no_other(
    server: RocserveProcess, expected: np.ndarray[Any, Any]
) -> None:
    bad = {
        2: (FILES[1][:-100], "the image in input 'FILES' cannot be decoded: Premature end of JPEG file"),
        5: (b"GIF89a", "it seems to be a GIF image; a JPEG or a PNG is expected"),
        9: (b"", "it is empty"),
    }

    def ask(place: int) -> Any:
        file = bad[place][0] if place in bad else FILES[place % len(FILES)]
        try:
            return sent(server, "files", tensor("FILES", "BYTES", objects([file]).reshape(1, 1)))[0]
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    for place, answer in enumerate(answers):
        if place in bad:
            assert isinstance(answer, InferenceServerException)
            assert answer.status() == "StatusCode.INVALID_ARGUMENT"
            assert bad[place][1] in answer.message()
        else:
            np.testing.assert_array_equal(answer, expected[place % len(FILES)])


def test_the_index_of_a_bad_image_is_told(server: RocserveProcess) -> None:
    files = objects([FILES[0], FILES[1], b"\x89PNG\r\n\x1a\n", FILES[2]])
    with pytest.raises(InferenceServerException, match="image 2 of input 'FILES' cannot be decoded: Premature end"):
        sent(server, "list_of_files", tensor("FILES", "BYTES", files))


def test_the_choice_of_the_engine_is_in_the_log(server: RocserveProcess) -> None:
    assert "pipeline.json runs on engine cpu: the instance is KIND_CPU" in server.log_text
