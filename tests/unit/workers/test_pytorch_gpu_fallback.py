"""A GPU that PyTorch's build cannot use: which models go on on the CPU, and which do not; with real workers."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest
import pytest_asyncio
from support.dispatching import dispatcher_of
from support.machine import ToldMachine
from support.pytorch import NO_PYTORCH, TorchFiles
from support.workers import mail_of

from rocserve.backends.base import Machine
from rocserve.backends.pytorch import BACKEND
from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import FolderReading
from rocserve.core.custom_metrics import EventLabels, event_labels
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.serving import ServingTableHolder
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.version_loader import LoadedModelVersion, WorkerVersionLoader
from rocserve.workers.launcher import WorkerLauncher

pytestmark = [pytest.mark.long, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=NO_PYTORCH)]

LOG = logging.getLogger("rocserve.test.fallback")
ON_GPU = "instance_group { kind: KIND_GPU }"

Load = Callable[..., Coroutine[None, None, LoadedModelVersion]]


class WithGpu(ToldMachine):
    """A machine with PyTorch's build for AMD GPUs; the real one is for CPUs, and finds no GPU."""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return module == "torch"


class WithLowering(WithGpu):
    """A machine with torch_migraphx, too; the worker does not find it."""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return module in ("torch", "torch_migraphx", "migraphx")


AMD_GPU = WithGpu(gpus=(0,))


@pytest.fixture
def fallbacks() -> Counter[EventLabels]:
    return Counter()


@pytest_asyncio.fixture(loop_scope="module")
async def load(
    plane: PlaneLoop, launcher: WorkerLauncher, torch_files: TorchFiles, tmp_path: Path, fallbacks: Counter[EventLabels]
) -> AsyncIterator[Load]:
    dispatcher, mail = dispatcher_of(ServingTableHolder()), mail_of(plane)
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    versions: list[LoadedModelVersion] = []

    async def loaded(config: str, model: str = "classifier", machine: Machine = AMD_GPU) -> LoadedModelVersion:
        loader = WorkerVersionLoader(launcher, mail, dispatcher, machine, LOG, fallbacks=fallbacks)
        (folder / "1" / "model.pt2").write_bytes(torch_files.data(model))
        (folder / "config.pbtxt").write_text(f'backend: "pytorch" {config}')
        (definition,) = FolderReading(folder, BackendRegistry([BACKEND])).definitions()
        version = await loader.load(LoadOrder(definition, 1, folder / "1"))
        assert isinstance(version, LoadedModelVersion)
        versions.append(version)
        return version

    yield loaded
    for version in versions:
        await version.unload()


async def test_a_model_that_does_not_insist_goes_on_on_the_cpu(
    load: Load, fallbacks: Counter[EventLabels], caplog: pytest.LogCaptureFixture
) -> None:
    if importlib.util.find_spec("torch_migraphx") is not None:
        pytest.skip("torch_migraphx is installed")
    loaded = await load("", machine=WithLowering(gpus=(0,)))
    assert loaded.available
    properties = loaded.properties
    assert (properties["engine"], properties["engine_replaces"]) == ("eager", "migraphx")
    assert (properties["devices"], properties["device"]) == ("cpu", "cpu")
    reason = properties["engine_reason"]
    on_gpu, _, before = reason.partition("; earlier, ")
    assert on_gpu.startswith("engine eager cannot load it on the GPU: model 'm': PyTorch 2.")
    assert "finds no GPU that it can use" in on_gpu
    assert before.startswith("engine migraphx cannot load it: model 'm': engine migraphx needs torch_migraphx, which ")
    assert loaded.status_reason.startswith(f"served by eager instead: {reason[:100]}")
    assert fallbacks == {event_labels(model="m", version=1, engine="migraphx", replaced_by="eager"): 1}
    warnings = [record for record in caplog.records if record.name == LOG.name and record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert warnings[1].message == f"model 'm' version 1: {reason}; engine eager on the CPU replaces it"


async def test_a_model_that_asks_for_the_gpu_is_not_moved(load: Load, fallbacks: Counter[EventLabels]) -> None:
    with pytest.raises(ServeError, match=r"PyTorch .* finds no GPU that it can use; install PyTorch's ") as caught:
        await load(ON_GPU)
    assert caught.value.code is StatusCode.UNAVAILABLE and "replaces it" not in caught.value.text
    assert not fallbacks


async def test_what_is_wrong_with_the_file_is_wrong_on_the_cpu_too(load: Load) -> None:
    with pytest.raises(ServeError) as caught:
        await load("", model="weights")
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert caught.value.text.startswith("model.pt2 holds a pickle of weights or of a module, not a program")
