"""The engine migraphx for PyTorch programs. torch_migraphx needs an AMD GPU; its stand-in is called in the same way,
and gives the same files."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.pytorch import NO_PYTORCH, TorchFiles

from rocserve.backends.base import ModelSource
from rocserve.cache.folders import is_private
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.plain import from_json
from rocserve.settings import EngineSettings

if TYPE_CHECKING:
    from support.torch_lowering import Lowerings

pytestmark = [pytest.mark.long, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=NO_PYTORCH)]

SourceMaker = Callable[..., ModelSource]


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lowerings]:
    """The stand-in, registered as torch_migraphx registers its compiler."""
    import torch
    from support.torch_lowering import Lowerings

    torch._dynamo.list_backends()  # Registers PyTorch's own compilers.
    registry = torch._dynamo.backends.registry
    monkeypatch.setattr(registry, "_COMPILER_FNS", {**registry._COMPILER_FNS})
    monkeypatch.setattr(registry, "_BACKENDS", {**registry._BACKENDS})
    monkeypatch.setitem(sys.modules, "torch_migraphx", ModuleType("torch_migraphx"))
    asked = Lowerings()
    torch._dynamo.register_backend(partial(asked.compile_graph), name="migraphx")
    torch._dynamo.reset()
    with torch._inductor.config.patch(freezing=True):  # torch_migraphx sets it.
        yield asked
    torch._dynamo.reset()


def test_each_shape_is_lowered_once_and_loaded_from_its_file(
    torch_files: TorchFiles, lowerings: Lowerings, tmp_path: Path
) -> None:
    import torch

    from rocserve.backends.pytorch.exported_file import read_exported
    from rocserve.backends.pytorch.torch_migraphx import LoweringJob, open_lowered

    file = tmp_path / "model.pt2"
    file.write_bytes(torch_files.data("classifier"))
    sizes = range(1, 11)  # More than PyTorch's own bound of shapes for one program.
    shapes = tuple(((rows, 4),) for rows in sizes)
    LoweringJob("m", str(file), str(tmp_path), "cpu", "fp16", shapes).perform(lambda text: None)
    assert lowerings.shapes == [shape for (shape,) in shapes]
    assert lowerings.options == [{"fp16": True}] * len(shapes)
    assert set(lowerings.constants) == {0}

    torch._dynamo.reset()
    lowerings.options.clear()
    lowered = {own: tmp_path / f"{place}.pt" for place, own in enumerate(shapes)}
    program = open_lowered(read_exported(file), "fp16", lowered)
    assert program.signature.precision == "fp16"
    inputs, expected = torch_files.values("classifier")
    x = np.concatenate([inputs["x"]] * 3)
    scores = np.concatenate([expected["scores"]] * 3)
    with torch.inference_mode():
        for _ in range(2):
            for rows in sizes:
                result = program.call([torch.from_numpy(x[:rows])])
                np.testing.assert_allclose(result["scores"], scores[:rows], atol=1e-6)
        assert not lowerings.options
        turned = torch.from_numpy(np.asfortranarray(x[:3]))
        np.testing.assert_allclose(program.call([turned])["scores"], scores[:3], atol=1e-6)
        program.call([torch.from_numpy(x[:15])])
        lowerings.factor = 2.0
        for _ in range(2):
            with pytest.raises(ServeError, match=r"differs from PyTorch: the relative error of output 0 is 1,"):
                program.call([torch.from_numpy(x[:14])])
    assert lowerings.shapes[-2:] == [(15, 4), (14, 4)], "a shape without a file is lowered when it comes, once"
    assert lowerings.options == [{"fp16": True}] * 2


def test_shapes_that_have_not_come_for_long_go(
    torch_files: TorchFiles, lowerings: Lowerings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import weakref

    import torch
    from support.torch_lowering import LoweredProgram

    from rocserve.backends.pytorch import torch_migraphx
    from rocserve.backends.pytorch.exported_file import read_exported

    programs: weakref.WeakSet[Any] = weakref.WeakSet()

    begin = LoweredProgram.__init__

    def counted(self: LoweredProgram, *args: Any) -> None:
        begin(self, *args)
        programs.add(self)

    monkeypatch.setattr(LoweredProgram, "__init__", counted)
    monkeypatch.setattr(torch_migraphx, "MOST_SIZES", 3)
    file = tmp_path / "model.pt2"
    file.write_bytes(torch_files.data("classifier"))
    ahead: torch_migraphx.Shapes = ((2, 4),)
    torch_migraphx.LoweringJob("m", str(file), str(tmp_path), "cpu", "fp32", (ahead,)).perform(lambda text: None)
    torch._dynamo.reset()
    programs.clear()
    lowerings.shapes.clear()
    program = torch_migraphx.open_lowered(read_exported(file), "fp32", {ahead: tmp_path / "0.pt"})

    def call(*sizes: int) -> list[int]:
        """Run these batch sizes; return the sizes that were lowered for them."""
        lowerings.shapes.clear()
        with torch.inference_mode():
            for rows in sizes:
                assert program.call([torch.ones(rows, 4)])["scores"].shape == (rows, 3)
        return [rows for rows, _ in lowerings.shapes]

    assert call(2, 3, 4, 5, 3) == [3, 4, 5]
    assert call(6, 7, 2) == [6, 7], "4 and 5 go"
    gc.collect()
    assert len(programs) == 3
    assert call(3, 6, 7, 4, 2) == [4], "3 had come since"
    gc.collect()
    assert len(programs) == 3


def test_a_child_process_lowers_it_once(
    torch_files: TorchFiles, model_source: SourceMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rocserve.backends.pytorch.model_check import ModelCheck
    from rocserve.backends.pytorch.torch_migraphx import lowered_folder

    installed = tmp_path / "installed"
    (installed / "torch_migraphx-1.1.dist-info").mkdir(parents=True)
    (installed / "torch_migraphx-1.1.dist-info" / "METADATA").write_text("Name: torch_migraphx\nVersion: 1.1\n")
    (installed / "migraphx.py").write_text("__version__ = '2.14.0'\n")
    (installed / "torch_migraphx.py").write_text(
        "import torch, torch._inductor.config\nfrom support.torch_lowering import Lowerings\n"
        "def migraphx(graph, inputs, options):\n    return Lowerings().compile_graph(graph, inputs, options)\n"
        "torch._dynamo.register_backend(migraphx)\ntorch._inductor.config.freezing = True\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(installed), str(Path(__file__).parents[2]))))
    monkeypatch.syspath_prepend(installed)
    source = model_source("model.pt2", torch_files.data("classifier"))
    source = replace(source, settings=replace(source.settings, cache_directory=str(tmp_path / "cache")))
    cpu, shapes = torch.device("cpu"), (((1, 4),), ((3, 4),))

    def check() -> ModelCheck:
        return ModelCheck(source, cpu, "fp32")

    first = check()
    folder = lowered_folder(source, "fp32", cpu, shapes, first)
    assert first.report.parts[0].endswith(" inputs on torch_migraphx and PyTorch, largest error 0e+00")
    assert first.report.seconds > 0
    files = sorted(folder.glob("*.pt"))
    assert [file.name for file in files] == ["0.pt", "1.pt"]
    written = [file.stat().st_mtime_ns for file in files]
    again = check()
    assert lowered_folder(source, "fp32", cpu, shapes, again) == folder
    assert (again.report.parts, again.report.seconds) == (first.report.parts, 0)
    assert [file.stat().st_mtime_ns for file in files] == written
    keys: list[Any] = []
    recording: Any = SimpleNamespace(seconds=0.0, compiled_folder=lambda *asked: keys.append(asked[:3]))
    for precision in ("fp32", "bf16"):
        lowered_folder(source, precision, cpu, shapes, recording)
    assert keys[0] != keys[1], "another precision has another folder"
    lowered = torch.load(files[1], weights_only=False)
    inputs, expected = torch_files.values("classifier")
    with torch.no_grad():
        scores, _ = lowered(torch.from_numpy(inputs["x"][:3]))
    np.testing.assert_allclose(scores, expected["scores"][:3], atol=1e-6)


def test_a_program_that_cannot_be_lowered(
    torch_files: TorchFiles, lowerings: Lowerings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from rocserve.backends.pytorch.torch_migraphx import LoweringJob

    def refuse(graph: Any, inputs: Any, options: Mapping[str, Any]) -> Any:
        raise RuntimeError("no converter")

    monkeypatch.setitem(torch._dynamo.backends.registry._COMPILER_FNS, "migraphx", refuse)
    file = tmp_path / "model.pt2"
    file.write_bytes(torch_files.data("classifier"))
    with pytest.raises(ServeError, match=r"torch_migraphx cannot lower it: (.|\n)*no converter") as raised:
        LoweringJob("m", str(file), str(tmp_path), "cpu", "fp32", (((2, 4),),)).perform(lambda text: None)
    assert raised.value.code is StatusCode.UNAVAILABLE


def test_inputs_are_laid_out_as_the_program_takes_them() -> None:
    import torch
    from support.torch_lowering import Shape

    from rocserve.backends.pytorch.torch_migraphx import LaidOut

    class Program(torch.nn.Module):
        input_mgx_shapes = (Shape((1, 3)), Shape((0, 1)), Shape((7, 1)), Shape((0,)))

        def forward(self, *inputs: Any) -> Any:
            return inputs

    given = (torch.arange(6.0).reshape(3, 2), torch.ones(4, 2), torch.ones(1, 7), torch.tensor(5.0))
    found = LaidOut(Program())(*given)
    assert [value.stride() for value in found] == [(1, 3), (0, 1), (7, 1), ()]
    for own, theirs in zip(found, given, strict=True):
        assert torch.equal(own, theirs)
    assert found[2] is given[2] and found[3] is given[3]


@pytest.mark.parametrize(("precision", "factor", "is_right"), [("fp32", 1.1, False), ("bf16", 1.05, True)])
def test_other_numbers_than_pytorchs_are_found(
    torch_files: TorchFiles, lowerings: Lowerings, tmp_path: Path, precision: str, factor: float, is_right: bool
) -> None:
    from rocserve.backends.pytorch.comparison import COMPARISON_FILE, Comparison
    from rocserve.backends.pytorch.torch_migraphx import LoweringJob

    file = tmp_path / "model.pt2"
    file.write_bytes(torch_files.data("classifier"))
    lowerings.factor = factor
    LoweringJob("m", str(file), str(tmp_path), "cpu", precision, (((2, 4),),), 30.0).perform(lambda text: None)
    found = from_json(Comparison, (tmp_path / COMPARISON_FILE).read_bytes())
    (verdict,) = found.verdicts
    assert (verdict.right, verdict.output) == (is_right, "scores")
    assert lowerings.shapes == [(2, 4)], "compared with the lowered program, not with others"


def test_it_wants_a_gpu_and_a_program(torch_files: TorchFiles, model_source: SourceMaker, lowerings: Lowerings) -> None:
    from rocserve.backends.pytorch import torch_migraphx

    with pytest.raises(
        ServeError, match="engine migraphx runs programs on AMD GPUs only, but the instance is on the CPU"
    ):
        torch_migraphx.load(model_source("model.pt2", torch_files.data("classifier")))
    with pytest.raises(ServeError, match=r"engine migraphx takes programs of torch.export, and model.pt is a Torch"):
        torch_migraphx.load(model_source("model.pt", torch_files.data("traced")))


def test_shapes_that_are_lowered_ahead(torch_files: TorchFiles, model_source: SourceMaker) -> None:
    from rocserve.backends.pytorch.binding import bind
    from rocserve.backends.pytorch.exported_file import read_exported
    from rocserve.backends.pytorch.model import fixed_batch_sizes
    from rocserve.backends.pytorch.program import open_exported
    from rocserve.backends.pytorch.torch_migraphx import shapes_to_lower

    def ahead(name: str, **parameters: str) -> tuple[Any, ...]:
        source = model_source("model.pt2", torch_files.data(name), parameters=parameters)
        bound = bind(open_exported(read_exported(source.model_file)), source.config, lambda inputs: None)
        return shapes_to_lower(bound, fixed_batch_sizes(source.config, bound))

    assert ahead("few") == (((1, 4),), ((2, 4),), ((4, 4),), ((8, 4),))
    assert ahead("few", batch_sizes="3, 5") == (((3, 4),), ((5, 4),))
    assert ahead("fixed") == (((5, 4),),)
    assert ahead("nested", batch_sizes="2") == (((2, 4), (2, 1), (2, 4)),)


def test_a_torch_migraphx_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from rocserve.backends.pytorch.torch_migraphx import import_lowering

    monkeypatch.setitem(sys.modules, "torch_migraphx", None)
    with pytest.raises(ServeError, match=r"torch_migraphx cannot be imported with PyTorch 2\..*: import of ") as raised:
        import_lowering()
    assert raised.value.code is StatusCode.UNAVAILABLE


def test_what_it_builds_at_its_import_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rocserve.backends.pytorch.torch_migraphx import build_in_cache

    cache = tmp_path / "cache"
    settings = EngineSettings(cache_directory=str(cache))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/named")
    build_in_cache(settings)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/named"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    before = os.umask(0o002)
    try:
        build_in_cache(settings)
    finally:
        os.umask(before)
    (folder,) = (cache / "torch-extensions").iterdir()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    # Loading it runs code.
    assert is_private(cache) and is_private(folder)
