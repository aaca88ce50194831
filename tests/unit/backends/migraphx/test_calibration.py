"""Calibration data: its forms, and what is refused before MIGraphX sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pictures import jpeg

from rocserve.backends.migraphx.binding import DimensionRange, ProgramTensor
from rocserve.backends.migraphx.compiling.calibration import calibration_digest, read_calibration
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.core.errors import ServeError, StatusCode

Array = np.ndarray[Any, Any]


def _samples(count: int, *shape: int, dtype: Any = np.float32) -> Array:
    """Samples, each filled with its own number."""
    return np.broadcast_to(np.arange(count, dtype=dtype).reshape(-1, *[1] * len(shape)), (count, *shape)).copy()


class Model:
    """A model's folder, and the inputs of its program."""

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int | DimensionRange, ...]],
        *,
        batch_size: int = 0,
        kind: SourceKind = SourceKind.ONNX,
        datatype: str = "float",
    ) -> None:
        self.folder = folder
        self.parameters = {name: ProgramTensor(name, datatype, shape) for name, shape in shapes.items()}
        self._batch_size = batch_size
        self._kind = kind

    def read(self, data: str, samples: int = 128, pipeline: str = "") -> list[dict[str, Array]]:
        recipe = ProgramRecipe(
            ProgramSource(self._kind, "model", ""),
            CompileOptions(Target.REF, Precision.INT8, data, pipeline, samples),
            ProgramEnvironment("2.14.0"),
            input_shapes=dict.fromkeys(self.parameters, ()),
            batch_size=self._batch_size,
        )
        return [dict(run) for run in read_calibration(self.folder, recipe, self.parameters)]

    def refusal(self, data: str, **options: Any) -> str:
        with pytest.raises(ServeError) as error:
            self.read(data, **options)
        assert error.value.code is StatusCode.INVALID_ARGUMENT
        return error.value.text


def _first(runs: list[dict[str, Array]], name: str = "x") -> list[list[float]]:
    """The first number of each row of each run."""
    return [run[name].reshape(len(run[name]), -1)[:, 0].tolist() for run in runs]


class TestArrays:
    def test_an_npz_in_batches(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", x=_samples(5, 3))
        runs = Model(tmp_path, {"x": (2, 3)}, batch_size=2).read("s.npz")
        assert _first(runs) == [[0, 1], [2, 3], [4, 0]]
        assert all(run["x"].shape == (2, 3) and run["x"].flags.c_contiguous for run in runs)

    def test_fewer_samples_than_a_batch(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", x=_samples(2, 3))
        assert _first(Model(tmp_path, {"x": (5, 3)}, batch_size=5).read("s.npz")) == [[0, 1, 0, 1, 0]]

    def test_a_model_without_a_batch(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", x=_samples(3, 2, 4))
        runs = Model(tmp_path, {"x": (2, 4)}).read("s.npz")
        assert [run["x"].shape for run in runs] == [(2, 4)] * 3
        assert [run["x"][0, 0] for run in runs] == [0, 1, 2]

    def test_only_so_many_are_used(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", x=_samples(9, 3))
        model = Model(tmp_path, {"x": (1, 3)}, batch_size=1)
        assert _first(model.read("s.npz", samples=2)) == [[0], [1]]
        folder = tmp_path / "f"
        folder.mkdir()
        for index in range(3):
            np.save(folder / f"{index}.npy", _samples(2, 3))
        assert len(model.read("f", samples=3)) == 3

    def test_several_inputs(self, tmp_path: Path) -> None:
        shapes = {"x": (2, 3), "a/b:0": (2,)}
        np.savez(tmp_path / "s.npz", **{"x": _samples(2, 3), "a/b:0": _samples(2)})
        (tmp_path / "f/x").mkdir(parents=True)
        (tmp_path / "f/a/b:0").mkdir(parents=True)
        for index in range(2):
            np.save(tmp_path / f"f/x/{index}.npy", np.full(3, index, np.float32))
            np.save(tmp_path / f"f/a/b:0/{index}.npy", np.array(index, np.float32))
        model = Model(tmp_path, shapes, batch_size=2)
        from_npz, from_folders = model.read("s.npz"), model.read("f")
        for name in shapes:
            np.testing.assert_array_equal(from_npz[0][name], from_folders[0][name])

    def test_a_folder_of_samples_and_stacks(self, tmp_path: Path) -> None:
        (tmp_path / "f").mkdir()
        np.save(tmp_path / "f/b.npy", _samples(2, 3) + 1)
        np.save(tmp_path / "f/a.npy", np.zeros(3, np.float32))
        (tmp_path / "f/notes.txt").write_text("of no meaning")
        (tmp_path / "f/.hidden.npy").write_text("of no meaning")
        assert _first(Model(tmp_path, {"x": (1, 3)}, batch_size=1).read("f")) == [[0], [1], [2]]

    def test_a_folder_of_the_one_inputs_name(self, tmp_path: Path) -> None:
        (tmp_path / "f/x").mkdir(parents=True)
        np.save(tmp_path / "f/x/a.npy", _samples(2, 3))
        assert len(Model(tmp_path, {"x": (1, 3)}, batch_size=1).read("f")) == 2

    def test_images_of_a_tensorflow_graph_are_turned(self, tmp_path: Path) -> None:
        image = np.arange(2 * 4 * 5 * 3, dtype=np.float32).reshape(2, 4, 5, 3)
        np.savez(tmp_path / "s.npz", x=image)
        (run,) = Model(tmp_path, {"x": (2, 3, 4, 5)}, batch_size=2, kind=SourceKind.TENSORFLOW).read("s.npz")
        np.testing.assert_array_equal(run["x"], image.transpose(0, 3, 1, 2))
        assert run["x"].flags.c_contiguous


class TestRefusals:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Model:
        return Model(tmp_path, {"x": (1, 3), "y": (1, 2)}, batch_size=1)

    @pytest.mark.parametrize(
        ("arrays", "text"),
        [
            ({"x": _samples(2, 3)}, "must have the model's inputs (x, y); it lacks 'y'"),
            ({"x": _samples(2, 3), "y": _samples(2, 2), "z": _samples(2)}, "(x, y); it has 'z'"),
            (
                {"x": _samples(2, 4), "y": _samples(2, 2)},
                "has shape [2, 4] for input 'x' (s.npz), expected [3] or, for",
            ),
            ({"x": _samples(2, 1, 3), "y": _samples(2, 2)}, "several samples, [samples, 3]"),
            (
                {"x": _samples(2, 3, dtype=np.float64), "y": _samples(2, 2)},
                "has float64 for input 'x' (s.npz), expected",
            ),
            ({"x": _samples(2, 3), "y": _samples(1, 2)}, "must have as many samples of each input, and at least one"),
            ({"x": _samples(0, 3), "y": _samples(0, 2)}, "it has 0 of 'x', 0 of 'y'"),
            ({"x": np.array([None]), "y": _samples(1, 2)}, "cannot be read as an .npz file: Object arrays cannot"),
        ],
    )
    def test_arrays_that_do_not_fit(self, model: Model, arrays: dict[str, Array], text: str) -> None:
        np.savez(model.folder / "s.npz", **arrays)
        assert text in model.refusal("s.npz")

    def test_files_that_are_no_data(self, model: Model) -> None:
        (model.folder / "s.npz").write_bytes(b"not a zip")
        refused = "must be an .npz file, an .npy file for one input, or a folder of .npy files or images"
        assert refused in model.refusal("s.npz")
        np.savez(model.folder / "s.npz", x=_samples(2, 3), y=_samples(2, 2))
        whole = (model.folder / "s.npz").read_bytes()
        for place in range(30, len(whole), 7):
            (model.folder / "s.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            try:
                model.read("s.npz")
            except ServeError as error:
                assert error.code is StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize(
        "shape", ["True,", "-1,", f"0, {1 << 70}", f"{1 << 60},", "1.5,", "1," * 100, "-" * 9000 + "1,"]
    )
    def test_arrays_whose_head_is_damaged(self, tmp_path: Path, shape: str) -> None:
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape})}}".encode()
        array = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(64)
        (tmp_path / "s.npy").write_bytes(array)
        model = Model(tmp_path, {"x": (1, 3)}, batch_size=1)
        assert "has file s.npy, which cannot be read as an array: " in model.refusal("s.npy")

    def test_folders_that_do_not_fit(self, model: Model) -> None:
        (model.folder / "f").mkdir()
        assert "must have a folder for each input (x, y)" in model.refusal("f")
        (model.folder / "f/x").mkdir()
        assert "must have the model's inputs (x, y); it lacks 'y'" in model.refusal("f")
        (model.folder / "f/y").mkdir()
        assert "has no .npy files for input 'x'" in model.refusal("f")
        (model.folder / "f/x/a.npy").write_bytes(b"\x93NUMPY")
        assert "has file a.npy, which cannot be read as an array" in model.refusal("f")

    def test_links_that_lead_out(self, tmp_path: Path) -> None:
        model = Model(tmp_path / "m", {"x": (1, 3)}, batch_size=1)
        (model.folder / "f").mkdir(parents=True)
        np.save(tmp_path / "secret.npy", _samples(1, 3))
        (model.folder / "f/a.npy").symlink_to(tmp_path / "secret.npy")
        assert "'a.npy' is a link that leads out of the model's folder" in model.refusal("f")
        options = CompileOptions(Target.REF, Precision.INT8, "f")
        with pytest.raises(ServeError, match=r"calibration_data: 'a.npy' is a link that leads out of the model's"):
            calibration_digest(options, model.folder)
        (model.folder / "f/a.npy").rename(model.folder / "f/.a.npy")
        np.save(model.folder / "f/b.npy", _samples(1, 3))
        assert len(calibration_digest(options, model.folder)) == 64

    def test_a_batch_that_varies(self, tmp_path: Path) -> None:
        (tmp_path / "f").mkdir()
        model = Model(tmp_path, {"x": (DimensionRange(1, 3), 3)})
        assert "input 'x' cannot be calibrated, because its shape is not fixed" in model.refusal("f")

    def test_a_model_without_inputs(self, tmp_path: Path) -> None:
        (tmp_path / "f").mkdir()
        assert "a model without inputs cannot be calibrated" in Model(tmp_path, {}).refusal("f")


class TestImages:
    def _pipeline(self, folder: Path, name: str = "pipeline.json", **more: Any) -> None:
        resize = {
            "operation": "ResizeMirrorNormalize",
            "dest_width": 8,
            "dest_height": 6,
            "mean": [0, 0, 0],
            "std_dev": [2, 2, 2],
            "is_output": True,
            **more,
        }
        (folder / name).write_text(json.dumps({"mean_std_range": "pixel", "pipeline": [resize]}))

    def _images(self, folder: Path, count: int = 3) -> None:
        (folder / "photos").mkdir(exist_ok=True)
        for index in range(count):
            (folder / f"photos/{index}.jpg").write_bytes(jpeg(20 + index, 30))

    def test_they_go_through_the_models_pipeline(self, tmp_path: Path) -> None:
        self._pipeline(tmp_path)
        self._images(tmp_path)
        runs = Model(tmp_path, {"x": (2, 3, 6, 8)}, batch_size=2).read("photos")
        assert [run["x"].shape for run in runs] == [(2, 3, 6, 8)] * 2
        assert 50 < runs[0]["x"].max() <= 127.5
        assert len(Model(tmp_path, {"x": (1, 3, 6, 8)}, batch_size=1).read("photos", samples=2)) == 2
        (one,) = Model(tmp_path, {"x": (2, 3, 6, 8)}).read("photos")
        np.testing.assert_array_equal(one["x"], runs[0]["x"])

    def test_images_beside_arrays(self, tmp_path: Path) -> None:
        self._pipeline(tmp_path)
        self._images(tmp_path)
        np.save(tmp_path / "photos/a.npy", _samples(1, 3, 6, 8))
        assert "'photos' holds both images (0.jpg) and arrays (a.npy); keep only one kind" in Model(
            tmp_path, {"x": (2, 3, 6, 8)}, batch_size=2
        ).refusal("photos")

    def test_a_pipeline_by_name_in_the_layout_of_the_input(self, tmp_path: Path) -> None:
        self._images(tmp_path)
        model = Model(tmp_path, {"x": (1, 6, 8, 3)}, batch_size=1)
        assert "holds images, but there is no rocAL pipeline" in model.refusal("photos")
        self._pipeline(tmp_path, "other.json")
        assert model.read("photos", pipeline="other.json")[0]["x"].shape == (1, 6, 8, 3)

    def test_what_is_refused(self, tmp_path: Path) -> None:
        self._images(tmp_path)
        model = Model(tmp_path, {"x": (1, 3, 6, 8)}, batch_size=1)
        self._pipeline(tmp_path, dest_width=9)
        assert model.refusal("photos") == (
            "the model's input 'x' takes images of shape [3, 6, 8] and type float32, but calibration_pipeline"
            " pipeline.json makes others: the pipeline gives [3, 6, 9]"
        )
        self._pipeline(tmp_path, dtype="FP16")
        assert model.refusal("photos").endswith('makes others: the pipeline\'s "dtype" says FP16')
        (tmp_path / "pipeline.json").write_text("{")
        assert "pipeline.json: " in model.refusal("photos")
        self._pipeline(tmp_path)
        (tmp_path / "photos/1.jpg").write_bytes(b"no picture")
        assert "calibration image 1.jpg cannot be used: " in model.refusal("photos")
        assert "must have at least 4 images, the number that input 'x' holds" in Model(
            tmp_path, {"x": (4, 3, 6, 8)}
        ).refusal("photos")
        raw = {**json.loads((tmp_path / "pipeline.json").read_text()), "decoder": {"input": "raw"}}
        (tmp_path / "pipeline.json").write_text(json.dumps(raw))
        assert "calibration_pipeline pipeline.json must take only encoded images" in model.refusal("photos")
