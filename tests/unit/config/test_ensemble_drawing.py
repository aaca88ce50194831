from __future__ import annotations

import re
from itertools import pairwise

import pytest

from rocserve.config.ensemble_drawing import NodeKind, draw
from rocserve.config.pbtxt import parse_model_config
from rocserve.core.model_names import ModelKey
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.protocol.page_pb2 import EnsembleGraphResponse, GraphBox


def config(*steps: str, outputs: str = "LAST", max_batch_size: int = 0) -> ModelConfig:
    """Steps are written as "model: read read -> written written"; the ensemble's input is IN."""
    text = (
        f'platform: "ensemble" max_batch_size: {max_batch_size} input {{ name: "IN" data_type: TYPE_FP32 dims: [ 3 ] }}'
    )
    for output in outputs.split():
        text += f' output {{ name: "{output}" data_type: TYPE_STRING dims: [ 1 ] }}'
    text += " ensemble_scheduling {"
    for step in steps:
        model, reads, writes = re.fullmatch(r"(\S+): (.*) -> (.*)", step).groups()  # type: ignore[union-attr]
        maps = "".join(f' input_map {{ key: "I{n}" value: "{tensor}" }}' for n, tensor in enumerate(reads.split()))
        maps += "".join(f' output_map {{ key: "O{n}" value: "{tensor}" }}' for n, tensor in enumerate(writes.split()))
        text += f' step {{ model_name: "{model}" model_version: -1{maps} }}'
    return parse_model_config(text + " }", "config.pbtxt")


MEMBER = parse_model_config(
    'max_batch_size: 4 output { name: "O0" data_type: TYPE_STRING dims: [ 2, -1 ] } output { name: "O1" }',
    "config.pbtxt",
)


def steps(drawing: EnsembleGraphResponse) -> dict[str, GraphBox]:
    return {box.model: box for box in drawing.boxes if box.kind == NodeKind.STEP}


def titles(drawing: EnsembleGraphResponse) -> list[str]:
    return [label.title for label in drawing.labels]


def ends(path: str) -> tuple[tuple[float, float], tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d", path)]
    return (numbers[0], numbers[1]), (numbers[-2], numbers[-1])


def test_steps_follow_what_they_wait_for_and_arrows_have_types() -> None:
    chain = config("late: mid -> LAST", "early: IN -> mid", "beside: IN -> SIDE", outputs="LAST SIDE", max_batch_size=2)
    drawing = draw(chain, {ModelKey("early"): MEMBER}, 900)
    found = steps(drawing)
    assert found["early"].y == found["beside"].y < found["late"].y
    request, answer = (
        next(box for box in drawing.boxes if box.kind == kind) for kind in (NodeKind.REQUEST, NodeKind.ANSWER)
    )
    assert request.y + request.height < found["early"].y
    assert found["late"].y + found["late"].height < answer.y
    assert sorted(titles(drawing)) == ["IN FP32 [-1,3]", "IN FP32 [-1,3]", "LAST", "SIDE", "mid BYTES [-1,2,-1]"]
    # Each arrow leaves a box at its lower edge and ends at the upper edge of another.
    lower, upper = {box.y + box.height for box in drawing.boxes}, {box.y for box in drawing.boxes}
    for path in drawing.arrows:
        (_, start), (_, end) = ends(path)
        assert any(abs(start - y) < 0.1 for y in lower)
        assert any(abs(end - y) < 0.1 for y in upper)


@pytest.mark.parametrize("width", [240, 360, 900, 4000])
def test_boxes_and_texts_do_not_cover_each_other(width: int) -> None:
    wide = [f"m{number}: IN -> t{number}" for number in range(6)]
    last = f"last: {' '.join(f't{number}' for number in range(6))} IN -> LAST"
    drawing = draw(config(*wide, last), {}, width)
    for index, box in enumerate(drawing.boxes):
        assert box.x >= 0
        assert box.x + box.width <= drawing.width
        assert box.y + box.height <= drawing.height
        for other in drawing.boxes[index + 1 :]:
            assert (
                box.x + box.width <= other.x
                or other.x + other.width <= box.x
                or box.y + box.height <= other.y
                or other.y + other.height <= box.y
            )
    lines = sorted(label.y for label in drawing.labels)
    assert all(below - above >= 16 for above, below in pairwise(lines))


def test_what_a_server_would_refuse_is_drawn() -> None:
    odd = draw(config("one: nothing -> a", "two: a -> LAST"), {}, 900)
    (unwritten,) = (box for box in odd.boxes if box.kind == NodeKind.UNWRITTEN)
    assert unwritten.title == "written by no step"
    assert any(
        ends(path)[0] == (pytest.approx(unwritten.x + unwritten.width / 2, abs=0.1), unwritten.y + unwritten.height)
        for path in odd.arrows
    )
    circle = draw(config("one: IN b -> a", "two: a -> b LAST"), {}, 900)
    assert steps(circle).keys() == {"one", "two"}
    assert len(circle.arrows) == 4
    itself = draw(config("one: IN a -> a LAST"), {}, 900)
    assert len(itself.arrows) == 3


def test_long_names_are_cut_and_kept_as_titles() -> None:
    name = "a_model_with_a_name_that_is_longer_than_any_box_may_be"
    (box,) = steps(draw(config(f"{name}: IN -> LAST"), {}, 300)).values()
    assert box.title == name
    assert box.text.endswith("…")
    assert name.startswith(box.text[:-1])
