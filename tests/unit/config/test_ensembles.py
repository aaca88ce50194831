from __future__ import annotations

from dataclasses import replace

import pytest

from rocserve.config.completion import normalise
from rocserve.config.ensemble_checks import check_ensemble, check_no_cycle
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.validation import check_model_config
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import EnsembleStep, InputConfig, ModelConfig, OutputConfig

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
    assert _fault(_step("a", {"x": "inn"}, {"y": "out"})) == (
        "ensemble input 'in' for ensemble e' is not used; nothing writes what a step reads: inn"
    )
    assert _fault(_step("a", {"x": "in"}, {"y": "other"})) == (
        "ensemble output 'out' for ensemble e' is not used; nothing reads what a step writes: other"
    )


def test_output_that_nothing_leads_to() -> None:
    assert _fault(_A, _step("b", {"x": "nowhere", "z": "mid"}, {"y": "out"})) == (
        "output 'out' for ensemble 'e' is not written: at least one of its depending tensors, 'nowhere', is not"
        " connected"
    )


def test_circle_of_steps() -> None:
    fault = _fault(
        _step("a", {"x": "in", "z": "back"}, {"y": "mid"}), _step("b", {"x": "mid"}, {"y": "out", "z": "back"})
    )
    assert fault.startswith("output 'out' for ensemble 'e' is not written: at least one of its depending tensors,")


def test_tensor_without_a_reader() -> None:
    assert _fault(_A, _step("b", {"x": "mid"}, {"y": "out", "z": "spare"})) == (
        "ensemble tensor 'spare' is unused in ensemble 'e'"
    )


def _model(name: str, dims: tuple[int, ...] = (4,), max_batch_size: int = 8) -> ModelConfig:
    return ModelConfig(
        name,
        max_batch_size=max_batch_size,
        inputs=(InputConfig("x", DataType.FP32, dims),),
        outputs=(OutputConfig("y", DataType.FP32, dims),),
    )


_ENSEMBLE = ModelConfig(
    "e",
    platform="ensemble",
    backend="ensemble",
    max_batch_size=8,
    inputs=(InputConfig("in", DataType.FP32, (4,)),),
    outputs=(OutputConfig("out", DataType.FP32, (4,)),),
    ensemble_steps=(
        EnsembleStep("a", -1, {"x": "in"}, {"y": "mid"}),
        EnsembleStep("b", -1, {"x": "mid"}, {"y": "out"}),
    ),
)


def _wiring_fault(ensemble: ModelConfig = _ENSEMBLE, **members: ModelConfig | None) -> str:
    with pytest.raises(ServeError) as raised:
        check_ensemble(ensemble, {"a": _model("a"), "b": _model("b")} | members)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    return raised.value.text


def test_all_agrees() -> None:
    check_ensemble(_ENSEMBLE, {"a": _model("a"), "b": _model("b", (-1,), 16)})


def test_a_decoupled_member() -> None:
    decoupled, plain = replace(_model("a"), decoupled=True), _model("b", (-1,), 16)
    assert check_ensemble(_ENSEMBLE, {"a": decoupled, "b": plain}) is True
    assert check_ensemble(_ENSEMBLE, {"a": _model("a"), "b": plain}) is False


def test_steps_in_any_order() -> None:
    last = EnsembleStep("join", -1, {"x": "left", "z": "right"}, {"y": "out"})
    steps = (
        last,
        EnsembleStep("b", -1, {"x": "mid"}, {"y": "right"}),
        EnsembleStep("c", -1, {"x": "mid"}, {"y": "left"}),
    )
    ensemble = replace(_ENSEMBLE, ensemble_steps=(*steps, EnsembleStep("a", -1, {"x": "in"}, {"y": "mid"})))
    join = replace(_model("join"), inputs=tuple(InputConfig(name, DataType.FP32, (4,)) for name in ("x", "z")))
    members = {"a": _model("a"), "b": _model("b"), "c": _model("c"), "join": join}
    assert check_ensemble(ensemble, members) is False
    assert check_ensemble(ensemble, members | {"a": replace(_model("a"), decoupled=True)}) is True
    with pytest.raises(ServeError, match="different decoupled models; it is the step of 'join'"):
        check_ensemble(ensemble, members | {"c": replace(_model("c"), decoupled=True)})


def test_members_that_are_not_there() -> None:
    assert _wiring_fault(b=None) == "ensemble e contains models that are not available or ambiguous: b"
    with pytest.raises(ServeError, match=r"not available or ambiguous: a, b$"):
        check_ensemble(_ENSEMBLE, {})


def test_smaller_batch() -> None:
    assert _wiring_fault(b=_model("b", max_batch_size=4)) == (
        "ensemble e allows maximum batch size 8, but it contains model b which only allows maximum batch size to be 4"
    )


def test_map_to_an_unknown_input() -> None:
    member = replace(_model("a"), inputs=(InputConfig("z", DataType.FP32, (4,)),))
    assert _wiring_fault(a=member) == "in ensemble e, ensemble tensor in is mapping to non-existing input x in model a"


def test_map_from_an_unknown_output() -> None:
    member = replace(_model("a"), outputs=(OutputConfig("z", DataType.FP32, (4,)),))
    assert (
        _wiring_fault(a=member) == "in ensemble e, ensemble tensor mid is mapped from non-existing output y in model a"
    )


def test_input_without_a_map() -> None:
    extra = InputConfig("w", DataType.FP32, (4,))
    member = replace(_model("a"), inputs=(*_model("a").inputs, extra))
    assert _wiring_fault(a=member) == "in ensemble e, input w in model a is not mapped to any ensemble tensors"
    optional = replace(member, inputs=(*_model("a").inputs, replace(extra, optional=True)))
    check_ensemble(_ENSEMBLE, {"a": optional, "b": _model("b")})


def test_datatypes() -> None:
    member = replace(_model("b"), inputs=(InputConfig("x", DataType.BYTES, (4,)),))
    assert _wiring_fault(b=member) == (
        "in ensemble e, ensemble tensor mid: inconsistent data type: TYPE_FP32 is inferred from model a while"
        " TYPE_STRING is inferred from model b"
    )


def test_datatype_of_the_ensembles_own_output() -> None:
    member = replace(_model("b"), outputs=(OutputConfig("y", DataType.FP16, (4,)),))
    assert _wiring_fault(b=member) == (
        "in ensemble e, ensemble tensor out: inconsistent data type: TYPE_FP32 is inferred from model e while"
        " TYPE_FP16 is inferred from model b"
    )


def test_shapes() -> None:
    assert _wiring_fault(b=replace(_model("b"), inputs=(InputConfig("x", DataType.FP32, (5,)),))) == (
        "in ensemble e, ensemble tensor mid: inconsistent shape: [-1,4] is inferred from model a while [-1,5] is"
        " inferred from model b"
    )


def test_member_without_batching() -> None:
    check_ensemble(_ENSEMBLE, {"a": _model("a"), "b": _model("b", (-1, 4), 0)})
    check_ensemble(_ENSEMBLE, {"a": _model("a"), "b": _model("b", (1, 4), 0)})
    assert "inconsistent shape" in _wiring_fault(b=_model("b", (1, 5), 0))


def test_reshape_of_the_ensembles_ends() -> None:
    ensemble = replace(_ENSEMBLE, inputs=(InputConfig("in", DataType.FP32, (2, 2), reshape=(4,)),))
    check_ensemble(ensemble, {"a": _model("a"), "b": _model("b")})


def _containing(name: str, *members: str) -> ModelConfig:
    return ModelConfig(name, ensemble_steps=tuple(EnsembleStep(member, -1, {}, {}) for member in members))


def test_circle_of_ensembles() -> None:
    ensembles = {"a": _containing("a", "m", "b"), "b": _containing("b", "c", "c"), "c": _containing("c", "a")}
    with pytest.raises(ServeError) as raised:
        check_no_cycle("a", ensembles)
    assert raised.value.text == "circular dependency between ensembles: a -> b -> c -> a"


def test_ensemble_of_itself() -> None:
    with pytest.raises(ServeError, match="circular dependency between ensembles: a -> a"):
        check_no_cycle("a", {"a": _containing("a", "a")})


def test_shared_members_and_circles_elsewhere_are_no_circle() -> None:
    ensembles = {
        "a": _containing("a", "b", "c"),
        "b": _containing("b", "d"),
        "c": _containing("c", "d", "x"),
        "d": _containing("d", "m"),
        "x": _containing("x", "y"),
        "y": _containing("y", "x"),
    }
    check_no_cycle("a", ensembles)
