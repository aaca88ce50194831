"""The pytorch backend on the CPU: each kind of file, names, precisions, and refusals."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.pytorch import NO_COMPILER, TorchFiles, has_compiler

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.backends.warmup import as_served
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceGroup, InstanceKind, OutputConfig
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy

# Importing PyTorch takes seconds.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here; `make pytorch` installs it"),
]

SourceMaker = Callable[..., ModelSource]
FP32, INT64 = DataType.FP32, DataType.INT64
ROWS_OF_4 = InputConfig("x", FP32, (4,))


@pytest.fixture
def saved(model_source: SourceMaker, torch_files: TorchFiles) -> SourceMaker:
    """Describe one of the files of `torch_files`, by its name there, as a model source."""

    def make(name: str, **options: Any) -> ModelSource:
        path = torch_files.path(name)
        return model_source(f"model{path.suffix}", path.read_bytes(), **options)

    return make


def load(source: ModelSource) -> LoadedModel:
    from rocserve.backends.pytorch import eager

    return eager.load(source)


def run(model: LoadedModel, inputs: Mapping[str, np.ndarray], *wanted: str) -> dict[str, Any]:
    datatypes = {spec.name: spec.datatype for spec in model.signature.inputs}
    tensors = {name: tensor_from_numpy(name, array, datatypes[name]) for name, array in inputs.items()}
    for tensor in tensors.values():
        # As memory that only the server may write.
        tensor.data = memoryview(tensor.data).toreadonly()
    names = wanted or tuple(spec.name for spec in model.signature.outputs)
    outputs = model.execute(Batch(tensors, names, (len(next(iter(inputs.values()))),))).outputs
    return {
        name: np.frombuffer(value.data, np.uint16).reshape(value.shape) if isinstance(value, Tensor) else value
        for name, value in outputs.items()
    }


def check(model: LoadedModel, files: TorchFiles, name: str, tolerance: float = 1e-6) -> None:
    """Check that the model gives what PyTorch gave, for all rows and for the first."""
    inputs, expected = files.values(name)
    model.warm_up([])
    for rows in (None, 1):
        given = {key: value[:rows] for key, value in inputs.items()}
        outputs = run(model, given)
        for key, value in expected.items():
            np.testing.assert_allclose(outputs[key], value[:rows], atol=tolerance)


def refusal(source: ModelSource, has_places: bool = False) -> str:
    """`has_places`: the worker's log has a traceback, too."""
    with pytest.raises(ServeError) as raised:
        load(source)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert has_places == (raised.value.__cause__ is not None)
    return raised.value.text


def test_a_program_says_all_of_itself(saved: SourceMaker, torch_files: TorchFiles) -> None:
    model = load(saved("classifier"))
    assert model.signature.inputs == (TensorSpec("x", FP32, (-1, 4)),)
    assert model.signature.outputs == (TensorSpec("scores", FP32, (-1, 3)), TensorSpec("best", INT64, (-1,)))
    assert model.signature.supports_batching
    check(model, torch_files, "classifier")
    inputs, _ = torch_files.values("classifier")
    assert list(run(model, inputs, "best")) == ["best"]
    model.close()


def test_the_rows_that_a_program_was_exported_for_bound_its_batches(saved: SourceMaker) -> None:
    assert load(saved("few")).signature.max_batch_size == 8
    assert refusal(saved("few", max_batch_size=9)) == (
        "max_batch_size of model 'model' is 9, but its program was exported for at most 8 rows"
    )


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("ids", 10, "input 'ids' has the value 10, and its program takes 0 to 9"),
        ("ids", -1, "input 'ids' has the value -1, and its program takes 0 to 9"),
        ("ends", 1 << 40, "input 'ends' has the value 1099511627776, and its program takes -10 to 9"),
    ],
)
def test_a_value_beyond_what_a_program_looks_into_fails_its_own_request(
    saved: SourceMaker, torch_files: TorchFiles, name: str, wrong: int, text: str
) -> None:
    model = load(saved("look_up"))
    inputs, expected = torch_files.values("look_up")
    check(model, torch_files, "look_up", tolerance=1e-5)
    inputs[name][3] = wrong
    tensors = {key: tensor_from_numpy(key, value) for key, value in inputs.items()}
    result = model.execute(Batch(tensors, ("OUTPUT__0",), (2, 2, 1)))
    assert {place: (error.code, error.text) for place, error in result.failures.items()} == {
        1: (StatusCode.INVALID_ARGUMENT, text)
    }
    others = np.array([True, True, False, False, True])
    np.testing.assert_allclose(result.outputs["OUTPUT__0"][others], expected["OUTPUT__0"][others], atol=1e-5)
    with pytest.raises(ServeError) as raised:
        model.execute(Batch(tensors, ("OUTPUT__0",), (5,)))
    assert (raised.value.code, raised.value.text) == (StatusCode.INVALID_ARGUMENT, text)
    with pytest.raises(ServeError, match=r"input '(ids|ends)' has the value"):
        model.warm_up([Batch(tensors, ("OUTPUT__0",), (2, 2, 1))])
    assert not model.execute(Batch({key: tensor_from_numpy(key, value[:2]) for key, value in inputs.items()},
                                   ("OUTPUT__0",), (1, 1))).failures  # fmt: skip


def test_a_program_of_one_shape_does_not_batch(saved: SourceMaker, torch_files: TorchFiles) -> None:
    model = load(saved("fixed"))
    assert not model.signature.supports_batching and model.signature.inputs[0].shape == (5, 4)
    inputs, expected = torch_files.values("fixed")
    np.testing.assert_allclose(run(model, inputs)["scores"], expected["scores"], atol=1e-6)
    with pytest.raises(ServeError, match=r"Guard failed|shape") as raised:
        run(model, {"x": inputs["x"][:2]})
    assert raised.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("name", "device"), [("classifier", "cpu"), ("traced", "cpu"), ("split", "cpu, meta")])
def test_of_kind_model_parts_stay_where_the_file_has_them(
    saved: SourceMaker, torch_files: TorchFiles, name: str, device: str
) -> None:
    batch = {} if name == "split" else {"inputs": [ROWS_OF_4], "max_batch_size": 8}
    model = load(saved(name, kind=InstanceKind.MODEL, **batch))
    assert model.properties["device"] == device
    inputs, expected = torch_files.values(name)
    for key, value in run(model, inputs, *expected).items():
        np.testing.assert_allclose(value, expected[key], atol=1e-6)


def test_of_kind_model_a_device_that_is_not_here(saved: SourceMaker, torch_files: TorchFiles) -> None:
    source = saved("on_second_gpu", inputs=[ROWS_OF_4], max_batch_size=8, kind=InstanceKind.MODEL)
    placed = refusal(source, has_places=True)
    assert "(KIND_MODEL leaves the parts of a model on the devices that its file names; PyTorch" in placed
    assert placed.endswith("GPUs here)")
    # On an instance of another kind they are moved.
    check(load(saved("on_second_gpu", inputs=[ROWS_OF_4], max_batch_size=8)), torch_files, "traced")


def test_inductor_compiles_for_one_device(saved: SourceMaker) -> None:
    from rocserve.backends.pytorch import inductor

    with pytest.raises(ServeError, match=r"the parts of model.pt2 are on cpu and meta; set parameter 'engine' to"):
        inductor.load(saved("split", kind=InstanceKind.MODEL))


def test_torchscript_is_not_inductor_s(saved: SourceMaker) -> None:
    from rocserve.backends.pytorch import inductor

    text = "model.pt is a TorchScript program; export the module with torch.export, or remove the parameter"
    with pytest.raises(ServeError, match=text):
        inductor.load(saved("traced", inputs=[ROWS_OF_4], parameters={"engine": "inductor"}))


def test_inductor_takes_no_example_that_is_a_part_of_another_tensor(
    torch_files: TorchFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rocserve.backends.pytorch.inductor import InductorJob

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    job = InductorJob("m", str(torch_files.path("part")), str(tmp_path), "cpu", "", "", "{}")
    with pytest.raises(ServeError, match="an example for input 'x' that is a part of another tensor, or expanded"):
        job.perform(lambda text: None)


@pytest.mark.skipif(not has_compiler(), reason=NO_COMPILER)
def test_a_package_takes_what_it_was_compiled_for(
    model_source: SourceMaker, torch_files: TorchFiles, torch_packages: TorchFiles
) -> None:
    outputs = [OutputConfig("RESULT[states]", FP32, (-1, 8)), OutputConfig("RESULT[all_mean]", FP32, (8,))]

    def package(most: int, datatype: DataType = INT64) -> ModelSource:
        inputs = [InputConfig(f"ARGS[{place}]", datatype, (-1,)) for place in range(4)]
        data = torch_packages.data("encoders")
        return model_source("model.pt2", data, inputs=inputs, outputs=outputs, max_batch_size=most)

    values, expected = torch_files.values("encoders")
    for most, sizes in ((8, (2, 1)), (1, (1,))):
        model = load(package(most))
        assert model.properties["program"] == "a package of AOTInductor"
        for rows in sizes:
            given = run(model, {f"ARGS[{place}]": array[:rows] for place, array in enumerate(values.values())})
            np.testing.assert_allclose(given["RESULT[states]"], expected["states"][:rows], atol=1e-6)
            np.testing.assert_allclose(given["RESULT[all_mean]"], expected["all_mean"][:rows], atol=1e-6)
    # The compiled code would read beyond the ends of its rows.
    assert "compiled for INT64 [-1, -1]; change config.pbtxt, or compile" in refusal(package(8, DataType.INT32))


@pytest.mark.skipif(not has_compiler(), reason=NO_COMPILER)
def test_a_package_is_padded_where_padding_does_not_show(
    model_source: SourceMaker, torch_files: TorchFiles, torch_packages: TorchFiles
) -> None:
    """Nothing tells where its ids end, nor that an input is a mask. One of its encoders sees what its mask hides."""
    widths = {"states": (-1, 8), "mean": (8,)}
    outputs = [OutputConfig(f"RESULT[{of}{name}]", FP32, dims) for of in ("", "all_") for name, dims in widths.items()]
    inputs = [InputConfig(f"ARGS[{place}]", INT64, (-1,)) for place in range(4)]
    sizes = {"sizes": "ARGS[0]:0=8,16; ARGS[2]:0=8,16"}
    data = torch_packages.data("encoders")
    model = load(model_source("model.pt2", data, inputs=inputs, outputs=outputs, max_batch_size=8, parameters=sizes))
    assert "rows are independent" in model.load_check.parts
    assert "dimension 'ARGS[0]:0' may be padded" in model.load_check.parts
    assert "dimension 'ARGS[2]:0' must not be padded: output 'RESULT[all_states]'" in str(model.load_check)
    values, expected = torch_files.values("encoders")
    tensors = {
        f"ARGS[{place}]": tensor_from_numpy(f"ARGS[{place}]", array, INT64)
        for place, array in enumerate(values.values())
    }
    batch = Batch(tensors, ("RESULT[states]", "RESULT[mean]"), (2,))
    padded = model.execute(as_served(batch, model._config, model.signature.padding)).outputs  # type: ignore[attr-defined]
    assert padded["RESULT[states]"].shape == (2, 8, 8)
    np.testing.assert_allclose(padded["RESULT[states]"][:, :5], expected["states"], atol=1e-6)
    np.testing.assert_allclose(padded["RESULT[mean]"], expected["mean"], atol=1e-6)


@pytest.mark.parametrize(
    "names", [("x", "options_scale", "bias"), ("INPUT__0", "INPUT__1", "INPUT__2"),
              ("ARGS[0]", "ARGS[1][scale]", "KWARGS[bias]")],
)  # fmt: skip
def test_inputs_go_by_any_of_their_names(saved: SourceMaker, torch_files: TorchFiles, names: tuple[str, ...]) -> None:
    widths = (4, 1, 4)
    # In another order than the program's.
    inputs = [InputConfig(name, FP32, (width,)) for name, width in zip(names, widths, strict=True)][::-1]
    outputs = [OutputConfig("RESULT[1][moved]", FP32, (4,)), OutputConfig("RESULT[0]", FP32, (4,))]
    model = load(saved("nested", inputs=inputs, outputs=outputs, max_batch_size=8))
    values, expected = torch_files.values("nested")
    given = run(model, dict(zip(names, values.values(), strict=True)))
    np.testing.assert_allclose(given["RESULT[0]"], expected["OUTPUT__0"])
    np.testing.assert_allclose(given["RESULT[1][moved]"], expected["OUTPUT__1"])


def test_a_default_name_goes_before_what_others_are_known_by(saved: SourceMaker) -> None:
    """A configuration that `rocserve config` has written contains all default names."""
    x = np.ones((2, 4), np.float32)
    model = load(saved("named", max_batch_size=4))
    names = ("OUTPUT__1", "OUTPUT__0", "OUTPUT__2", "OUTPUT__3", "OUTPUT__4")
    assert tuple(spec.name for spec in model.signature.outputs) == names, "a key without a matching name is ignored"
    written = saved(
        "named",
        max_batch_size=4,
        outputs=tuple(OutputConfig(name, FP32, (4,)) for name in names),
    )
    for one in (model, load(written)):
        assert [run(one, {"x": x})[name][0, 0] for name in names] == [2, 3, 4, 5, 6]
    inputs = tuple(InputConfig(name, FP32, (4,)) for name in ("INPUT__1", "INPUT__0"))
    swapped = load(saved("swapped", inputs=inputs))
    given = {"INPUT__1": np.full(4, 5, np.float32), "INPUT__0": np.ones(4, np.float32)}
    assert run(swapped, given)["OUTPUT__0"].tolist() == [3] * 4


def test_arguments_and_results_that_are_no_tensors_are_left_out(
    saved: SourceMaker, torch_files: TorchFiles, tmp_path: Path
) -> None:
    check(load(saved("sized", max_batch_size=8)), torch_files, "sized")
    pytest.importorskip("onnxscript", reason="no onnxscript here; `make pytorch` installs it")
    from rocserve.backends.pytorch.onnx_export import OnnxJob

    file = tmp_path / "model.pt2"
    file.write_bytes(torch_files.data("sized"))
    OnnxJob("m", str(file), str(tmp_path), ("x",), ()).perform(lambda text: None)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    inputs, expected = torch_files.values("sized")
    assert [output.name for output in session.get_outputs()] == ["OUTPUT__0"]
    np.testing.assert_allclose(session.run(None, inputs)[0], expected["OUTPUT__0"])


def test_inputs_larger_than_memory(saved: SourceMaker) -> None:
    load(saved("corner")).warm_up([])
    for dims in ((1 << 20, 1 << 20), (1 << 40, 1 << 40)):
        inputs = (InputConfig("x", FP32, dims),)
        source = saved("corner_script", inputs=inputs)
        assert "a run with zeros, which would show them, fails: not enough memory for zeros as input 'x'" in refusal(
            source
        )


def test_a_program_that_pytorch_saves_and_cannot_run(saved: SourceMaker) -> None:
    text = "cannot make a module of the program: too many positional arguments"
    assert text in refusal(saved("own_self"), has_places=True)


def test_bf16_goes_through(saved: SourceMaker, torch_files: TorchFiles) -> None:
    model = load(saved("half"))
    assert model.signature.inputs[0].datatype is model.signature.outputs[0].datatype is DataType.BF16
    check(model, torch_files, "half")


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2), ("fp16", 2e-3)])
@pytest.mark.parametrize("name", ["classifier", "traced"])
def test_precision(saved: SourceMaker, torch_files: TorchFiles, name: str, precision: str, tolerance: float) -> None:
    source = saved(name, inputs=[ROWS_OF_4], max_batch_size=8, parameters={"precision": precision})
    model = load(source)
    assert [spec.datatype for spec in model.signature.outputs] == [FP32, INT64]
    check(model, torch_files, name, tolerance)
    inputs, expected = torch_files.values(name)
    exact = np.array_equal(run(model, inputs)["scores"], expected["scores"])
    assert exact == (precision == "fp32")
    assert model.properties["precision"] == precision


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("has_sample", [False, True])
@pytest.mark.parametrize("name", ["typed", "typed_script"])
def test_a_precision_in_which_a_program_cannot_compute_is_refused_at_the_load(
    saved: SourceMaker, name: str, precision: str, has_sample: bool
) -> None:
    output = OutputConfig("OUTPUT__0", FP32, (4,))
    for outputs in ([], [output]):
        source = saved(name, inputs=[ROWS_OF_4], outputs=outputs, max_batch_size=4, parameters={"precision": precision})
        sample = Batch({"x": tensor_from_numpy("x", np.ones((2, 4), np.float32), FP32)}, ("OUTPUT__0",), (1, 1))
        with pytest.raises(ServeError) as raised:
            load(source).warm_up([sample] if has_sample else [])
        assert raised.value.code is StatusCode.INVALID_ARGUMENT
        datatype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[precision]
        assert raised.value.text.startswith(f"parameter 'precision' is \"{precision}\", but the program cannot compute")
        assert f"export the program in that precision (model.to({datatype}) before the export)" in raised.value.text


def test_inductor_refuses_such_a_precision_too(torch_files: TorchFiles, tmp_path: Path) -> None:
    from rocserve.backends.pytorch.inductor import InductorJob

    job = InductorJob("m", str(torch_files.path("typed")), str(tmp_path), "cpu", "bf16", "", "{}", trials="")
    with pytest.raises(ServeError, match=r"export the program in that precision \(model.to\(torch.bfloat16\) before"):
        job.perform(lambda text: None)


def test_a_program_that_refuses_zeros_in_every_precision_is_loaded(saved: SourceMaker) -> None:
    outputs = [OutputConfig("OUTPUT__0", FP32, (4,))]
    source = saved("only_positive", inputs=[ROWS_OF_4], outputs=outputs, parameters={"precision": "bf16"})
    model = load(source)
    model.warm_up([])
    assert run(model, {"x": np.ones(4, np.float32)})["OUTPUT__0"].shape == (4,)


def test_the_precision_is_the_weights_own_where_no_other_is_asked_for(saved: SourceMaker) -> None:
    model = load(saved("narrow"))
    assert model.properties["precision"] == "bf16"
    assert "precision" not in load(saved("half")).properties


@pytest.mark.parametrize("before", ["", "0"])
def test_reading_a_program_leaves_the_environment_as_it_was(
    saved: SourceMaker, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """The environment variable makes PyTorch load tensors only, while the process may load other objects, such as a
    module that torch_migraphx has saved."""
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    if before:
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", before)
    load(saved("classifier"))
    assert os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "") == before


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(("left", "right"), ("OUTPUT__0", "OUTPUT__1")), (("INPUT__0", "b__1"), ("sum__0", "rest__1")),
     (("first", "second"), ("one", "other"))],
)  # fmt: skip
def test_torchscript_by_names_places_or_order(
    saved: SourceMaker, torch_files: TorchFiles, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    source = saved(
        "in_place",
        inputs=[InputConfig(name, FP32, (4,)) for name in inputs],
        outputs=[OutputConfig(name, FP32, (4,)) for name in outputs],
        max_batch_size=8,
    )
    values, expected = torch_files.values("in_place")
    given = run(load(source), dict(zip(inputs, values.values(), strict=True)))
    for name, value in zip(outputs, expected.values(), strict=True):
        np.testing.assert_allclose(given[name], value)


def test_torchscript_with_a_dict(saved: SourceMaker, torch_files: TorchFiles) -> None:
    inputs = [InputConfig("b", FP32, (4,)), InputConfig("a", FP32, (4,))]
    check(
        load(saved("of_dict", inputs=inputs, max_batch_size=8)),
        torch_files,
        "of_dict",
    )


def test_sizes_of_outputs_that_vary_are_found_by_a_second_run(saved: SourceMaker) -> None:
    def shapes(name: str, **changes: Any) -> dict[str, tuple[int, ...]]:
        model = load(saved(name, **changes))
        return {spec.name: spec.shape for spec in model.signature.outputs}

    pair = tuple(InputConfig(name, FP32, (-1, 3)) for name in ("left", "right"))
    assert shapes("in_place", inputs=pair) == {"OUTPUT__0": (-1, 3), "OUTPUT__1": (-1, 3)}
    assert shapes("in_place", inputs=pair, max_batch_size=4) == {"OUTPUT__0": (-1, -1, 3), "OUTPUT__1": (-1, -1, 3)}
    assert shapes("words", inputs=(InputConfig("words", DataType.BYTES, (-1,)),)) == {
        "OUTPUT__0": (-1,),
        "OUTPUT__1": (-1,),
    }
    assert shapes("traced", inputs=(InputConfig("x", FP32, (-1, 4)),)) == {"scores": (-1, 3), "best": (-1,)}
    assert shapes("raising", inputs=(InputConfig("x", FP32, (5, 4)),))["rest"] == (-1, 4), "none of it for zeros"


def test_a_program_that_gives_no_row_for_each_does_not_batch(saved: SourceMaker) -> None:
    rows = InputConfig("x", FP32, (4,))
    text = refusal(saved("raising", max_batch_size=4, inputs=(rows,)))
    assert "output 'turned' of model 'model' has the shape [4, 1] for one row, so the model does not batch" in text
    assert "remove max_batch_size" in text


def test_an_argument_that_torchscript_need_not_have(saved: SourceMaker) -> None:
    x = np.ones(4, np.float32)
    bias = InputConfig("bias", FP32, (4,))
    without = load(saved("may_have", inputs=(ROWS_OF_4,)))
    assert run(without, {"x": x})["OUTPUT__0"].tolist() == [2] * 4
    for inputs in ((ROWS_OF_4, bias), (bias, ROWS_OF_4)):
        model = load(saved("may_have", inputs=inputs))
        assert run(model, {"x": x, "bias": 3 * x})["OUTPUT__0"].tolist() == [5] * 4


def test_torchscript_with_strings(saved: SourceMaker) -> None:
    words = InputConfig("words", DataType.BYTES, (-1,))
    outputs = [OutputConfig("OUTPUT__0", DataType.BYTES, (-1,)), OutputConfig("OUTPUT__1", INT64, (-1,))]
    model = load(saved("words", inputs=[words], outputs=outputs))
    given = run(model, {"words": np.array([b"one", "zwölf".encode(), b"\xff"], np.object_)})
    assert given["OUTPUT__0"].tolist() == [b"one!", "zwölf!".encode(), b"\xff!"]
    # A byte that is not UTF-8 reaches the program as a stand-in character.
    assert given["OUTPUT__1"].tolist()[:2] == [3, 6]


def test_memory_that_does_not_suffice(saved: SourceMaker) -> None:
    inputs, outputs = [InputConfig("x", FP32, (1,))], [OutputConfig("OUTPUT__0", FP32, (-1,))]
    model = load(saved("large", inputs=inputs, outputs=outputs))
    with pytest.raises(ServeError, match="can't allocate memory: you tried to allocate") as raised:
        run(model, {"x": np.array([1e15], np.float32)})
    assert raised.value.code is StatusCode.UNAVAILABLE
    assert run(model, {"x": np.array([3], np.float32)})["OUTPUT__0"].tolist() == [0, 0, 0]


def test_an_output_that_no_answer_can_hold(saved: SourceMaker) -> None:
    model = load(saved("sparse", inputs=[ROWS_OF_4], outputs=[OutputConfig("o", FP32, (4,))]))
    for _ in range(2):
        with pytest.raises(ServeError) as raised:
            run(model, {"x": np.ones(4, np.float32)})
        assert raised.value.code is StatusCode.INTERNAL
        assert "output 'o' is a tensor in torch.sparse_coo of torch.float32" in raised.value.text


def test_torchscript_needs_a_configuration_of_its_inputs(saved: SourceMaker) -> None:
    assert refusal(saved("in_place")) == (
        "the file of model 'model' has no datatypes and shapes of its inputs: give each input's name,"
        ' data_type and dims in config.pbtxt, as in input { name: "left" data_type: TYPE_FP32 dims: [ 8 ] };'
        " missing: left or INPUT__0"
    )
    other = saved("in_place", inputs=[InputConfig("x", FP32, (4,))])
    assert refusal(other).endswith("dims: [ 8 ] }; missing: right or INPUT__1; it has 'x'")


def test_the_cause_of_a_failure_of_torchscript_is_its_first_line(saved: SourceMaker) -> None:
    wide = [InputConfig("x", FP32, (5,))], [OutputConfig("OUTPUT__0", FP32, (-1,))]
    model = load(saved("traced", inputs=wide[0], outputs=wide[1], max_batch_size=8))
    with pytest.raises(ServeError) as raised:
        run(model, {"x": np.ones((1, 5), np.float32)})
    cause, *traceback = raised.value.text.splitlines()
    assert cause == "PyTorch: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x5 and 4x8)"
    assert "Traceback of TorchScript, serialized code (most recent call last):" in traceback


@pytest.mark.parametrize("name", ["weights", "pickled", "old"])
def test_pickles_are_refused(saved: SourceMaker, name: str) -> None:
    assert refusal(saved(name)).startswith(
        "model.pt holds a pickle of weights or of a module, not a program: load it where its class is defined and write"
        " torch.export.save("
    )


def test_triton_s_parameters(saved: SourceMaker, torch_files: TorchFiles) -> None:
    import torch

    parameters = {
        "INTRA_OP_THREAD_COUNT": "3",
        "INFERENCE_MODE": "false",
        "DISABLE_OPTIMIZED_EXECUTION": "true",
        "ENABLE_WEIGHT_SHARING": "true",
        "ENABLE_CACHE_CLEANING": "true",
        "ENABLE_JIT_PROFILING": "true",
    }
    model = load(saved("traced", inputs=[ROWS_OF_4], max_batch_size=8, parameters=parameters))
    assert torch.get_num_threads() == 3
    check(model, torch_files, "traced")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"precision": "int4"}, "parameter 'precision' of model 'model' must be one of fp32, fp16, bf16, not \"int4\""),
        (
            {"INFERENCE_MODE": "yes"},
            "parameter 'INFERENCE_MODE' of model 'model' must be true, false, 1 or 0, not \"yes\"",
        ),
        (
            {"ENABLE_NVFUSER": "true"},
            "model 'model': parameter 'ENABLE_NVFUSER' is not supported: PyTorch has no",
        ),
        ({"NUM_THREADS": "-1"}, "parameter 'NUM_THREADS' of model 'model' must be a whole number from 0 to "),
    ],
)
def test_parameters_that_cannot_be(saved: SourceMaker, parameters: dict[str, str], text: str) -> None:
    assert refusal(saved("classifier", parameters=parameters)).startswith(text)


def test_torch_migraphx_wants_a_gpu(saved: SourceMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from rocserve.backends.pytorch import torch_migraphx

    monkeypatch.setitem(sys.modules, "torch_migraphx", ModuleType("torch_migraphx"))
    source = saved("classifier", parameters={"engine": "migraphx"})
    with pytest.raises(
        ServeError, match="which runs programs on AMD GPUs only, but the instance is on the CPU"
    ) as error:
        torch_migraphx.load(source)
    assert error.value.code is StatusCode.UNAVAILABLE


def test_instances_share_the_cores(model_source: SourceMaker) -> None:
    from rocserve.backends.parameters import usable_cpus
    from rocserve.backends.pytorch.parameters import run_options

    group = InstanceGroup("", InstanceKind.CPU, usable_cpus())
    assert run_options(model_source("model.pt2", b"").config).intra_op_threads == usable_cpus()
    assert run_options(model_source("model.pt2", b"", instance_groups=[group]).config).intra_op_threads == 1


LOST = """
import torch
from rocserve.backends.pytorch.model import TorchModel
from rocserve.core.model_config import ModelConfig

lost = torch.AcceleratorError("CUDA error: device-side assert triggered")

def synchronize(device):
    if is_lost:
        raise lost

torch.cuda.synchronize = synchronize
model = object.__new__(TorchModel)
model.device, model._config = torch.device("cuda:0"), ModelConfig(name="m")
for is_lost in (False, True):
    model._exit_if_gpu_is_lost(ValueError("of the program"))
    print("lives", is_lost, flush=True)
    model._exit_if_gpu_is_lost(lost)
"""


def test_a_worker_that_has_lost_its_gpu_ends() -> None:
    ran = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (70, "lives False\nlives True\n"), ran.stderr
    assert "model 'm' has lost its GPU, and its worker ends: CUDA error: device-side assert" in ran.stderr


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [("fastest", "{}", "Unrecognized mode=fastest"), ("", '{"no_such": true}', "no_such")],
)
def test_what_inductor_is_asked_for_and_has_not_is_a_reason(
    torch_files: TorchFiles, tmp_path: Path, mode: str, options: str, reason: str
) -> None:
    from rocserve.backends.pytorch.inductor import InductorJob

    file = str(torch_files.folder / "classifier.pt2")
    job = InductorJob("m", file, str(tmp_path), "cpu", "fp32", mode, options, trials="")
    with pytest.raises(ServeError, match=f"Inductor cannot compile it: .*{reason}") as refusal:
        job.perform(lambda text: None)
    assert refusal.value.code is StatusCode.UNAVAILABLE


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="no torchao here; `make pytorch` installs it")
def test_a_program_with_torchaos_tensors_is_refused_with_the_cure(saved: SourceMaker) -> None:
    # torchao itself makes its tensors readable in its process, and another test may have imported it in this one.
    serialization = importlib.import_module("torch.serialization")
    readable = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        with pytest.raises(ServeError) as raised:
            load(saved("quantised"))
    finally:
        serialization.add_safe_globals(readable)
    assert "it holds objects of torchao.quantization." in raised.value.text
    assert "`exported = exported.run_decompositions()`" in raised.value.text
    assert "\x1b" not in raised.value.text
    cured = load(saved("plain"))
    (result,) = run(cured, {"input": np.array([[1, 2, 3, 4]], np.float32)}).values()
    # torchao keeps 127 steps of the largest weight / 127.5.
    np.testing.assert_allclose(result, [[509 * 127 / 127.5 + 0.5, 257 * 127 / 127.5 - 0.5]], rtol=1e-5)
