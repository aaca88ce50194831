"""What the engine on amd.rocal refuses when a model is loaded, and the texts."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.amd_rocal import setup_for

from rocserve.backends.base import LoadedModel, ModelSource, model_load_check, model_properties
from rocserve.backends.rocal.amd.binding import import_binding
from rocserve.backends.rocal.amd.engine import RocalEngine
from rocserve.backends.rocal.backend import load
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import LoadCheckFailed
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig

RESIZE = {"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": True}


def refusal(*steps: dict[str, Any], **options: Any) -> ServeError:
    with pytest.raises(ServeError) as raised:
        RocalEngine(setup_for(steps, **options))
    return raised.value


def test_without_amd_rocal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amd", None)
    error = refusal(RESIZE)
    assert error.code is StatusCode.UNAVAILABLE
    assert "amd.rocal is not installed" in error.text


def test_an_amd_rocal_without_what_is_needed(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(rocal, "externalSourceFeedInput")
    with pytest.raises(ServeError, match="no externalSourceFeedInput in rocal_pybind"):
        import_binding()


def test_an_amd_rocal_for_another_python(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rocal_pybind")
    for name in [name for name in sys.modules if name.partition(".")[0] == "amd"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(
        importlib.machinery.PathFinder,
        "find_spec",
        lambda name, *others: None if name == "rocal_pybind" else find(name, *others),
    )
    error = refusal(RESIZE)
    assert error.code is StatusCode.UNAVAILABLE
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"amd.rocal is installed, but not rocal_pybind for Python {python}" in error.text


def test_an_amd_rocal_whose_libraries_are_not_found(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError("librocal.so.2: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("rocserve.backends.rocal.amd.binding.importlib.import_module", fail)
    error = refusal(RESIZE)
    assert error.code is StatusCode.UNAVAILABLE
    assert "cannot be loaded: librocal.so.2: cannot open shared object file" in error.text
    assert "LD_LIBRARY_PATH" in error.text


def test_a_gpu_that_is_not_there(rocal: ModuleType) -> None:
    error = refusal(RESIZE, device=0)
    assert error.code is StatusCode.UNAVAILABLE
    assert error.text.startswith("rocAL cannot make a pipeline on an AMD GPU: Failed creating the pipeline; it wrote")


def test_a_graph_that_rocal_finds_wrong_does_not_end_the_worker(
    rocal: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(context: Any) -> Any:
        context.error = "no kernel for it"
        return rocal.types.RUNTIME_ERROR

    monkeypatch.setattr(rocal, "rocalVerify", refuse)
    error = refusal(RESIZE)
    assert error.text == "rocAL (version unknown) refuses the pipeline as a whole: no kernel for it"


def test_a_graph_whose_fault_only_its_status_tells(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(context: Any) -> Any:
        context.error = "no memory for it"
        return rocal.types.OK

    monkeypatch.setattr(rocal, "rocalVerify", verify)
    assert refusal(RESIZE).text == "rocAL (version unknown) refuses the pipeline as a whole: no memory for it"


def test_a_node_that_rocal_refuses(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: Any, *arguments: Any) -> None:
        context.error = "not like this"

    monkeypatch.setattr(rocal, "resize", refuse)
    assert refusal(RESIZE).text == "rocAL (version unknown) refuses pipeline[0] (Resize): not like this"


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            [{**RESIZE, "dest_width": 0, "dest_height": 0}],
            "pipeline[0] (Resize): rocAL does not resize to a dest_width and a dest_height that are both 0",
        ),
        ([{"operation": "rotate", "angle": 5, "is_output": True}], "only with images that all have one size"),
        (
            [RESIZE, {"operation": "rotate", "angle": 5, "dest_width": 4, "dest_height": 4, "is_output": True}],
            "rocAL leaves a part of the result unwritten",
        ),
        (
            [RESIZE, {"operation": "slice", "anchor": [0, 0], "shape": [3, 3], "out_of_bounds_policy": "PAD"},
             {**RESIZE}],
            'with "out_of_bounds_policy": "ERROR", not "PAD"',
        ),
        ([RESIZE, {"operation": "blur", "is_output": True}], "moves the picture four pixels to the left"),
        ([RESIZE, {"operation": "normalize", "axes": [0, 1], "is_output": True}], "use crop_mirror_normalize or"),
    ],
)  # fmt: skip
def test_operations_that_cannot_be_said(rocal: ModuleType, steps: list[dict[str, Any]], text: str) -> None:
    error = refusal(*steps)
    assert error.code is StatusCode.INVALID_ARGUMENT
    assert error.text.startswith("model 'model' cannot run on rocAL: pipeline[")
    assert text in error.text


def test_an_operation_that_this_amd_rocal_lacks(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import_binding()
    monkeypatch.delattr("amd.rocal.fn.lens_correction")
    lens = {"camera_matrix": [30, 20, 30, 15], "distortion_coeffs": [0.1, 0, 0, 0, 0]}
    error = refusal(RESIZE, {"operation": "lens_correction", **lens, "is_output": True})
    assert error.text.endswith(
        "pipeline[1] (lens_correction): amd.rocal (version unknown) has no such operation; use the CPU engine"
    )


def test_a_keyword_that_this_amd_rocal_lacks(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import_binding()
    monkeypatch.setattr("amd.rocal.fn.vignette", lambda *images, sdev=0.5: None)
    error = refusal({"operation": "vignette", "is_output": True})
    assert "fn.vignette of amd.rocal takes no 'vignette'" in error.text


def test_a_step_that_no_output_needs_is_left_out(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import_binding()
    monkeypatch.delattr("amd.rocal.fn.vignette")
    RocalEngine(setup_for([{"operation": "vignette", "name": "unused"}, {**RESIZE, "inputs": ["decoded"]}])).close()


def test_more_flags_than_rocal_pipelines_can_be_kept_for(rocal: ModuleType) -> None:
    flip = {"operation": "flip", "is_output": True, "vertical": {"input": "C"}}
    both = {"operation": "flip", "horizontal": {"input": "A"}, "vertical": {"input": "B"}}
    assert "input 'C' is one flag too many" in refusal(both, flip).text


def test_a_pipeline_that_cannot_run(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocal, "rocalRun", lambda context: rocal.types.RUNTIME_ERROR)
    error = refusal(RESIZE)
    assert error.code is StatusCode.UNAVAILABLE
    assert error.text == "rocAL cannot run the pipeline: its processing thread ended"


def test_all_batch_sizes_are_built_when_the_model_is_loaded(rocal: ModuleType) -> None:
    RocalEngine(setup_for([RESIZE], batch_size=6)).close()
    assert [context.batch_size for context in rocal.contexts] == [1, 2, 4, 6]


BRIGHTER = [RESIZE, {"operation": "brightness_fixed", "brightness": 0.5, "dtype": "FP32", "is_output": True}]


def test_rocal_is_compared_with_the_cpu_engine(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RocalEngine(setup_for(BRIGHTER))
    found = engine.compare()
    engine.close()
    assert found is not None
    assert not found.fault
    assert found.largest_error < 0.01
    monkeypatch.setattr(
        rocal, "brightness", lambda context, image, is_output, *others: rocal.copy(context, image, is_output)
    )
    engine = RocalEngine(setup_for(BRIGHTER))
    found = engine.compare()
    engine.close()
    assert found is not None
    assert "output 1 differs by" in found.fault
    assert "rocAL gives" in found.fault


@pytest.fixture
def broken(rocal: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LoadedModel]:
    """Loads a pipeline on a rocAL whose brightness does nothing."""
    monkeypatch.setattr(
        rocal, "brightness", lambda context, image, is_output, *others: rocal.copy(context, image, is_output)
    )
    (tmp_path / "pipeline.json").write_text(json.dumps({"mean_std_range": "pixel", "pipeline": BRIGHTER}))

    def loaded(engine: str = "rocal", **parameters: str) -> LoadedModel:
        config = ModelConfig(
            "m",
            max_batch_size=4,
            instance_groups=(InstanceGroup("", InstanceKind.GPU, 1),),
            parameters={"engine": engine, **parameters},
        )
        file = tmp_path / "pipeline.json"
        return load(ModelSource("m", 1, tmp_path, tmp_path, file, config, InstanceKind.GPU, None, 1))

    return loaded


WRONG = "rocAL does not give what the CPU engine does: output 1 differs by "


def test_a_rocal_that_differs_is_refused(broken: Callable[..., LoadedModel]) -> None:
    with pytest.raises(LoadCheckFailed) as caught:
        broken()
    assert caught.value.kind == "reference"
    assert caught.value.text.startswith(WRONG)


@pytest.mark.parametrize(
    ("parameters", "engine", "starts", "failures"),
    [
        ({"load_check": "warn"}, "rocal", WRONG, ("reference",)),
        ({"engine": "auto"}, "cpu", f"served by the CPU engine: {WRONG}", ("reference",)),
        ({"load_check": "off"}, "rocal", "", ()),
    ],
)
def test_a_rocal_that_differs_is_served_with_a_warning_if_that_is_asked_for(
    broken: Callable[..., LoadedModel], parameters: dict[str, str], engine: str, starts: str, failures: tuple[str, ...]
) -> None:
    model = broken(**parameters)
    report = model_load_check(model)
    assert model_properties(model)["engine"] == engine
    assert report.failures == failures
    assert report.warning.startswith(starts) and bool(report.warning) is bool(starts)
    model.close()
