from __future__ import annotations

import pytest

from rocserve.config.completion import normalise
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.validation import check_model_config
from rocserve.core.errors import ServeError

_ENDS = """
name: "e" platform: "ensemble"
input { name: "in" data_type: TYPE_FP32 dims: 1 }
output { name: "out" data_type: TYPE_FP32 dims: 1 }
"""


def _step(model: str, reads: dict[str, str], writes: dict[str, str]) -> str:
    maps = [
        f'{kind} {{ key: "{key}" value: "{value}" }}'
        for kind, pairs in (("input_map", reads), ("output_map", writes))
        for key, value in pairs.items()
    ]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def _check(text: str) -> None:
    message = parse_model_config(text, "config.pbtxt")
    normalise(message, None)
    check_model_config(message)


def _fault(*steps: str, ends: str = _ENDS, more: str = "") -> str:
    with pytest.raises(ServeError) as raised:
        _check(f"{ends} ensemble_scheduling {{ {' '.join(steps)} }} {more}")
    return raised.value.text


_A = _step("a", {"x": "in"}, {"y": "mid"})
_B = _step("b", {"x": "mid"}, {"y": "out"})


def test_a_chain_is_valid() -> None:
    _check(f"{_ENDS} ensemble_scheduling {{ {_A} {_B} }}")


def test_platform_may_be_left_out() -> None:
    ends = _ENDS.replace('platform: "ensemble"', "")
    _check(f"{ends} ensemble_scheduling {{ {_A} {_B} }}")


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("instance_group { count: 1 }", "instance group should not be specified for ensemble 'e'"),
        ("optimization { }", "optimization should not be specified for ensemble 'e'"),
    ],
)
def test_what_an_ensemble_cannot_have(more: str, fault: str) -> None:
    assert _fault(_A, _B, more=more) == fault


def test_steps_are_needed() -> None:
    assert _fault() == "must specify 'step' for ensemble 'e'"


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (_step("", {"x": "in"}, {"y": "out"}), "must specify 'model_name' in step 0 of ensemble 'e'"),
        (_step("a", {}, {"y": "out"}), "must specify 'input_map' in step 0 of ensemble 'e'"),
        (_step("a", {"x": "in"}, {}), "must specify 'output_map' in step 0 of ensemble 'e'"),
    ],
)
def test_step_fields(step: str, fault: str) -> None:
    assert _fault(step) == fault


def test_a_tensor_is_written_once() -> None:
    assert _fault(_step("a", {"x": "in"}, {"y": "out"}), _step("b", {"x": "in"}, {"y": "out"})) == (
        "ensemble tensor 'out' can appear in an output map only once for ensemble 'e' step 1"
    )


def test_unused_ends() -> None:
    assert _fault(_step("a", {"x": "other"}, {"y": "out"})) == "ensemble input 'in' for ensemble e' is not used"
    assert _fault(_step("a", {"x": "in"}, {"y": "other"})) == "ensemble output 'out' for ensemble e' is not used"


def test_output_that_nothing_leads_to() -> None:
    assert _fault(_A, _step("b", {"x": "nowhere", "z": "mid"}, {"y": "out"})) == (
        "output 'out' for ensemble 'e' is not written: at least one of its depending tensors, 'nowhere', is not"
        " connected"
    )


def test_circle_of_steps() -> None:
    fault = _fault(
        _step("a", {"x": "in", "z": "back"}, {"y": "mid"}),
        _step("b", {"x": "mid"}, {"y": "out", "z": "back"}),
    )
    assert fault.startswith("output 'out' for ensemble 'e' is not written: at least one of its depending tensors,")


def test_tensor_without_a_reader() -> None:
    assert _fault(_A, _step("b", {"x": "mid"}, {"y": "out", "z": "spare"})) == (
        "ensemble tensor 'spare' is unused in ensemble 'e'"
    )
