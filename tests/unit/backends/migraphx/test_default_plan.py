"""The sizes that are planned for open dimensions of which nobody has written any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper
from support.encoders import encoder

from rocserve.backends.base import ModelSource
from rocserve.backends.migraphx.compiling.plan import ProgramPlan, plan_programs
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment
from rocserve.backends.migraphx.compiling.wanted_sizes import SizesMissing, WantedSizes, fewer_sizes
from rocserve.backends.migraphx.default_sizes import affordable
from rocserve.backends.migraphx.options import Target, compile_options, serving_options
from rocserve.backends.written_sizes import half_steps
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.padding import NO_PADDING, PaddedDimension, Padding

TEXT = encoder(layers=1).SerializeToString()
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def test_every_second_size_is_left_out_of_dimensions_and_batches_in_turn() -> None:
    assert [*fewer_sizes((1, 2, 4, 8), [(16, 24, 32, 48, 64)], (1,))] == [
        ((1, 2, 4, 8), [(16, 24, 32, 48, 64)]),
        ((1, 2, 4, 8), [(16, 32, 64)]),
        ((1, 2, 8), [(16, 32, 64)]),
        ((1, 2, 8), [(16, 64)]),
        ((1, 8), [(16, 64)]),
        ((1, 8), [(64,)]),
    ]
    # Batch sizes that somebody has written stay.
    assert [*fewer_sizes((1, 3, 5), [(16, 24, 32), (8,)], (1, 3, 5))] == [
        ((1, 3, 5), [(16, 24, 32), (8,)]),
        ((1, 3, 5), [(16, 32), (8,)]),
        ((1, 3, 5), [(32,), (8,)]),
    ]


class Folder:
    """A model's folder; `plan` writes the file and plans its programs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = path / "1"
        self.version.mkdir(parents=True)

    def plan(self, content: bytes, default: Padding = NO_PADDING, **config: Any) -> ProgramPlan:
        file = self.version / "model.onnx"
        file.write_bytes(content)
        complete = ModelConfig("m", **{"backend": "onnx", **config})
        source = ModelSource("m", 1, self.path, self.version, file, complete, InstanceKind.AUTO, None, 1)
        options = compile_options(complete, InstanceKind.AUTO, {Target.REF})
        environment = ProgramEnvironment("2.14.0")
        return plan_programs(source, options, serving_options(complete), environment, default=default)

    def wanted(self, content: bytes, **config: Any) -> WantedSizes | None:
        with pytest.raises(SizesMissing) as missing:
            self.plan(content, **config)
        return missing.value.wanted


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "m")


def _sum(**shapes: tuple[int | str, ...]) -> bytes:
    """A model that adds its inputs."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, next(iter(shapes.values())))
    graph = helper.make_graph([helper.make_node("Sum", [*shapes], ["y"])], "g", values, [output])
    return bytes(helper.make_model(graph).SerializeToString())


def test_dimensions_without_a_number_are_wanted(folder: Folder) -> None:
    wanted = folder.wanted(TEXT, max_batch_size=4, parameters={"padding": "0; input_ids=1"})
    assert wanted is not None
    (dimension,) = wanted.padding.dimensions
    assert (dimension.label, dimension.inputs) == ("sequence", {"input_ids": (1,), "attention_mask": (1,)})
    assert dimension.sizes == half_steps(2048)
    assert wanted.padding.values == {"input_ids": 1.0}
    assert wanted.shapes == {"input_ids": (-1,), "attention_mask": (-1,)}
    assert wanted.has_rows
    fixed = folder.wanted(_sum(x=(1, "length", 4)))
    assert fixed is not None and not fixed.has_rows
    assert fixed.shapes == {"x": (1, -1, 4)}


@pytest.mark.parametrize(
    "content, config",
    [
        # The first dimension counts something; who knows what leaves it open.
        (_sum(x=("n", "length")), {"is_batch_size_written": True}),
        # `sizes` names another dimension.
        (_sum(x=("n", "height", "width")), {"max_batch_size": 2, "parameters": {"sizes": "height=8,16"}}),
        # Calibration data have one shape.
        (TEXT, {"max_batch_size": 2, "parameters": {"precision": "int8", "calibration_data": "samples.npz"}}),
    ],
    ids=["first dimension", "sizes", "calibration"],
)
def test_nothing_is_wanted(folder: Folder, content: bytes, config: dict[str, Any]) -> None:
    assert folder.wanted(content, **config) is None


def _padding(**sizes: tuple[int, ...]) -> Padding:
    return Padding(
        tuple(PaddedDimension(name, own, {"x": (place,)}) for place, (name, own) in enumerate(sizes.items(), 1))
    )


def test_sizes_and_batch_sizes_stay_within_the_most_programs(folder: Folder) -> None:
    two = _sum(x=("n", "h", "w"))
    plan = folder.plan(two, _padding(h=LENGTHS, w=LENGTHS), max_batch_size=8)
    powers = (16, 32, 64, 128, 256, 512)
    assert [one.sizes for one in plan.padding.dimensions] == [powers, powers]
    assert sorted({recipe.batch_size for recipe in plan.recipes}) == [1, 2, 8]
    assert len(plan.recipes) == 3 * 6 * 6
    assert plan.first.input_shapes == {"x": (1, 512, 512)}
    # Written batch sizes stay.
    written = folder.plan(
        two, _padding(h=LENGTHS, w=LENGTHS), max_batch_size=8, parameters={"batch_sizes": "1,2,3,4,5,6,7,8"}
    )
    assert len({recipe.batch_size for recipe in written.recipes}) == 8
    assert [one.sizes for one in written.padding.dimensions] == [(32, 128, 512)] * 2


def test_the_batch_that_a_file_fixes_stays(folder: Folder) -> None:
    plan = folder.plan(_sum(x=(2, "h", "w")), _padding(h=LENGTHS, w=LENGTHS), max_batch_size=32)
    assert {1, 2, 32} <= {recipe.batch_size for recipe in plan.recipes}
    assert plan.first.input_shapes == {"x": (2, 512, 512)}


def test_what_is_affordable(folder: Folder) -> None:
    plan = folder.plan(_sum(x=("n", "length")), _padding(length=LENGTHS), max_batch_size=4)

    def numbers(program_bytes: int = 0, free: int | None = None, seconds: float = 0.0, cached: int = 0) -> list[int]:
        known = plan.recipes[:cached]
        found = affordable(plan, program_bytes, free, seconds, known.__contains__)
        assert found.first is plan.first
        batches = {recipe.batch_size for recipe in found.recipes}
        assert len(found.recipes) == len(batches) * len(found.padding.dimensions[0].sizes)
        return [len(batches), len(found.padding.dimensions[0].sizes)]

    assert numbers(10**9) == [3, 11]
    assert numbers(1, 66) == [3, 11]
    assert numbers(1, 65) == [3, 6]
    assert numbers(1, 0) == [2, 1]
    assert numbers(seconds=100.0) == [3, 11]
    assert numbers(seconds=120.0) == [3, 6]
    assert numbers(seconds=120.0, cached=3) == [3, 11]
    assert numbers(seconds=1e6) == [2, 1]
