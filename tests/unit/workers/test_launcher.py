"""The zygote and the processes that it starts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from support.migraphx import python_words
from support.waiting import PATIENCE_SECONDS, until, wait_until
from support.workers import LOG, OwnChildren, Workshop, config_of, open_descriptors, pids, run_add_sub, running

from rocserve.core.errors import ServeError
from rocserve.core.model_config import InstanceKind
from rocserve.plane.loop import PlaneLoop
from rocserve.workers import process
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import WorkerPlan


async def facts_of(workshop: Workshop, **changes: object) -> dict[str, str]:
    """What a worker says of itself."""
    config = config_of("facts", name="facts", max_batch_size=0)
    group = await workshop.serving(config=config, **changes)
    return (await run_add_sub(group.instances[0])).facts


def zygote_of(workshop: Workshop) -> psutil.Process:
    assert workshop.launcher.zygote is not None
    return psutil.Process(workshop.launcher.zygote.process.pid)


@pytest.mark.parametrize("forked", [True, False])
async def test_what_a_worker_is(workshop: Workshop, forked: bool) -> None:
    facts = await facts_of(workshop, forked=forked)
    assert facts["engine_forked"] == str(forked)
    assert facts["grpc"] == "False"
    assert facts["comm"] == "rocserve:facts"
    assert facts["thread"] == "instance 0" and facts["count"] == "1"
    assert facts["oom"] == "300"
    assert psutil.Process(int(facts["pid"])).cmdline()


@pytest.mark.parametrize("forked", [True, False])
async def test_signals_to_the_whole_process_group_are_not_for_workers(workshop: Workshop, forked: bool) -> None:
    group = await workshop.serving(forked=forked)
    (pid,) = pids(group)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
        assert (await run_add_sub(group.instances[0])).error is None
    assert pids(group) == [pid]


async def test_forked_workers_do_not_share_their_random_numbers(workshop: Workshop) -> None:
    first, second = await facts_of(workshop), await facts_of(workshop)
    assert first["random"] != second["random"] and first["numpy_random"] != second["numpy_random"]


def test_what_seeds_forked_workers_is_imported_before_the_fork() -> None:
    program = "import sys, rocserve.workers.spawner; print('numpy.random' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "True\n"
    )


@pytest.mark.parametrize("forked", [True, False])
async def test_a_worker_keeps_to_its_cores(workshop: Workshop, forked: bool) -> None:
    core = max(os.sched_getaffinity(0))
    facts = await facts_of(workshop, forked=forked, plans=[WorkerPlan(InstanceKind.CPU, None, 1, cores=(core,))])
    assert facts["cores"] == f"[{core}]"


async def test_a_gpu_worker_sees_its_device_only_and_is_not_forked(workshop: Workshop) -> None:
    facts = await facts_of(workshop, plans=[WorkerPlan(InstanceKind.GPU, 3, 1)])
    assert (facts["device"], facts["hip"], facts["engine_forked"]) == ("3", "3", "False")


async def test_a_worker_that_is_started_by_a_loader_is_not_forked(workshop: Workshop) -> None:
    facts = await facts_of(workshop, loader=("/usr/bin/env", "LOADED_BY=env"))
    assert (facts["loaded_by"], facts["engine_forked"], facts["cache"]) == ("env", "False", "/somewhere")


async def test_a_worker_under_another_c_library(workshop: Workshop, migraphx_root: Path) -> None:
    *loader, _ = python_words(migraphx_root)
    facts = await facts_of(workshop, loader=tuple(loader))
    assert (facts["engine_forked"], facts["comm"]) == ("False", "rocserve:facts")
    assert psutil.Process(int(facts["pid"])).exe().startswith(str(migraphx_root))


async def test_a_loader_that_is_not_there(workshop: Workshop) -> None:
    group = workshop.group(loader=("/nowhere/ld.so", "--library-path", "/nowhere"))
    with pytest.raises(ServeError, match=r"there is no program loader '/nowhere/ld.so' for the worker's Python"):
        await group.load()


@pytest.fixture
def interpreter(tmp_path: Path) -> str:
    """A Python of an environment that has numpy (here the tests') and nothing else."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/*/site-packages"))
    numpy = Path(__import__("numpy").__file__).parent
    for part in (numpy, numpy.with_name("numpy.libs")):
        if part.exists():
            (packages / part.name).symlink_to(part)
    return str(environment / "bin" / "python")


async def test_another_interpreter_gets_rocserve_and_nothing_else_of_ours(workshop: Workshop, interpreter: str) -> None:
    facts = await facts_of(workshop, interpreter=interpreter)
    assert (facts["engine_forked"], facts["rocserve_on_path"]) == ("False", "False")


async def test_an_interpreter_that_is_not_there(workshop: Workshop) -> None:
    before = open_descriptors()
    for _ in range(3):
        group = workshop.group(interpreter="/nowhere/python")
        with pytest.raises(ServeError, match="there is no Python interpreter '/nowhere/python'"):
            await group.load()
    await until(lambda: open_descriptors() <= before)


async def test_too_many_instances_for_one_worker(workshop: Workshop) -> None:
    group = workshop.group(plans=[WorkerPlan(InstanceKind.CPU, None, 253)])
    with pytest.raises(ServeError, match="a worker can have 252 instances, not 253"):
        await group.load()
    group = await workshop.serving(plans=[WorkerPlan(InstanceKind.CPU, None, 60)])
    answers = await asyncio.gather(*(run_add_sub(instance) for instance in group.instances))
    assert len(answers) == 60 and not any(answer.error for answer in answers)


Preload = Callable[..., Workshop]


@pytest_asyncio.fixture(loop_scope="module")
async def preload(plane: PlaneLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Preload]:
    """Starts a zygote that imports these modules, with these sources of modules on its path."""
    started: list[tuple[Workshop, WorkerLauncher]] = []

    def start(*modules: str, **sources: str) -> Workshop:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{tmp_path}")
        launcher = WorkerLauncher(modules, LOG, answer_seconds=PATIENCE_SECONDS)
        launcher.start()
        started.append((Workshop(plane, launcher, tmp_path), launcher))
        return started[-1][0]

    yield start
    for workshop, launcher in started:
        await workshop.close()
        await launcher.close()


async def test_modules_that_are_not_there_or_broken_are_not_preloaded(
    preload: Preload, capfd: pytest.CaptureFixture[str]
) -> None:
    workshop = preload("rocserve_not_there", "broken_module", "numpy", broken_module="raise ZeroDivisionError('oh')\n")
    assert (await facts_of(workshop))["engine_forked"] == "True"
    error = capfd.readouterr().err
    assert "could not preload broken_module: ZeroDivisionError('oh')" in error
    assert "not_there" not in error


async def test_a_zygote_with_threads_does_not_fork(preload: Preload) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    assert (await facts_of(preload("thread_starter", thread_starter=source)))["engine_forked"] == "False"


async def test_the_cpu_engines_can_be_preloaded_without_threads(preload: Preload) -> None:
    workshop = preload("numpy", "onnxruntime", "cv2", "turbojpeg")
    assert (await facts_of(workshop))["engine_forked"] == "True"


async def test_a_launch_names_modules_that_the_zygote_imports_once(
    preload: Preload, capfd: pytest.CaptureFixture[str]
) -> None:
    workshop = preload(late_module="print('imported by', __import__('os').getpid(), flush=True)\n")
    for _ in range(2):
        assert (await facts_of(workshop, preload=("late_module",)))["engine_forked"] == "True"
    assert capfd.readouterr().out.split("imported by ") == ["", f"{zygote_of(workshop).pid}\n"]


async def test_an_import_that_ends_the_zygote_is_left_to_the_worker(
    preload: Preload, caplog: pytest.LogCaptureFixture
) -> None:
    workshop = preload(deadly_module="__import__('os')._exit(3)\n")
    facts = await facts_of(workshop, preload=("numpy", "deadly_module"))
    assert facts["engine_forked"] == "True"
    assert "the next zygote will not preload deadly_module, numpy" in caplog.text
    assert caplog.text.count("has ended (exited with status 3)") == 1


@pytest.mark.long
async def test_an_import_that_hangs_is_left_to_the_worker(preload: Preload, caplog: pytest.LogCaptureFixture) -> None:
    workshop = preload(slow_module="__import__('time').sleep(600)\n")
    await workshop.serving()
    workshop.launcher.answer_seconds = 5.0
    started = asyncio.create_task(facts_of(workshop, preload=("slow_module",)))
    await until(lambda: "it is killed and restarted" in caplog.text)
    workshop.launcher.answer_seconds = PATIENCE_SECONDS
    assert (await started)["engine_forked"] == "True"
    assert "the next zygote will not preload slow_module" in caplog.text


async def test_when_the_zygote_dies_workers_go_on_and_others_can_be_started(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    group = await workshop.serving()
    (worker,) = pids(group)
    zygote = zygote_of(workshop)
    zygote.kill()
    await until(lambda: "the zygote, which starts workers, has ended (killed by signal 9)" in caplog.text)
    assert (await run_add_sub(group.instances[0])).error is None
    second = await workshop.serving()
    assert (await run_add_sub(second.instances[0])).error is None
    # Only the kernel now reports the end of the old worker.
    os.kill(worker, signal.SIGKILL)
    await until(lambda: workshop.events.recoveries == 1)
    assert workshop.events.restarts[0][0] == "worker ended unexpectedly (its exit status is not known)"
    assert (await run_add_sub(group.instances[0])).error is None


async def test_without_the_zygote_all_processes_of_a_worker_end_with_it(
    workshop: Workshop, own_children: OwnChildren
) -> None:
    loading = asyncio.create_task(workshop.group("compiles", engine="rocserve_reporting_engine").load())
    await until((workshop.folder / "child").exists)
    await until(lambda: len(own_children()) == 2)
    zygote, (worker, child) = zygote_of(workshop), own_children()
    zygote.kill()
    await until(lambda: workshop.launcher.zygote is None)
    worker.kill()
    with pytest.raises(ServeError, match="worker ended while loading"):
        await loading
    await until(lambda: not running(child.pid))


async def test_a_zygote_that_is_stuck_holds_no_unload_up(
    workshop: Workshop, own_children: OwnChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_STATUS_WAIT_SECONDS", 0.5)
    group = await workshop.serving()
    zygote, (worker,) = zygote_of(workshop), own_children()
    zygote.suspend()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await group.stop(0.5)
    zygote.resume()
    await until(lambda: not running(worker.pid))


async def test_the_restart_has_the_workers_end_although_the_zygote_is_late(
    workshop: Workshop, own_children: OwnChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_BROKEN_SECONDS", "_STATUS_WAIT_SECONDS"):
        monkeypatch.setattr(process, name, PATIENCE_SECONDS)
    group = await workshop.serving()
    (session,) = group._sessions
    zygote, (worker,) = zygote_of(workshop), own_children()
    zygote.suspend()
    worker.kill()
    await until(lambda: not session.process.runs)
    # As when its closed socket has been noticed for a second.
    session.process.end_broken("it closed its control socket")
    zygote.resume()
    await until(lambda: workshop.events.recoveries == 1)
    assert workshop.events.restarts == [("worker ended unexpectedly (killed by signal 9)", 0.0)]


async def test_launches_under_way_survive_the_zygote(workshop: Workshop) -> None:
    await workshop.serving()
    zygote = zygote_of(workshop)
    zygote.suspend()
    tasks = [asyncio.create_task(workshop.serving()) for _ in range(3)]
    await asyncio.sleep(0.2)
    zygote.kill()
    for group in await asyncio.gather(*tasks):
        assert (await run_add_sub(group.instances[0])).error is None


@pytest.mark.long
async def test_a_zygote_that_does_not_answer_is_killed(preload: Preload, caplog: pytest.LogCaptureFixture) -> None:
    workshop = preload("numpy")
    launcher = workshop.launcher
    group = await workshop.serving()
    zygote = zygote_of(workshop)
    zygote.suspend()
    several = [asyncio.create_task(workshop.serving()) for _ in range(3)]
    assert (await run_add_sub(group.instances[0])).error is None, "the loop is not held up"
    assert not any(task.done() for task in several)

    launcher.answer_seconds = 5.0
    several.append(asyncio.create_task(workshop.serving()))
    await until(lambda: "it is killed and restarted" in caplog.text)
    # The next zygote has all the time that it needs.
    launcher.answer_seconds = PATIENCE_SECONDS
    for started in await asyncio.gather(*several):
        assert (await run_add_sub(started.instances[0])).error is None
    assert (await run_add_sub(group.instances[0])).error is None
    assert caplog.text.count("has not answered for 5 s; it is killed and restarted") == 1
    assert "will not preload" not in caplog.text


async def test_a_cancelled_launch_leaves_nothing(workshop: Workshop, own_children: OwnChildren) -> None:
    await workshop.serving()
    zygote = zygote_of(workshop)
    before = open_descriptors()
    zygote.suspend()
    task = asyncio.create_task(workshop.group().load())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    zygote.resume()
    # The zygote answers in order: once this worker has been launched, the cancelled one has been killed.
    await (await workshop.serving()).stop(PATIENCE_SECONDS)
    await until(lambda: len(own_children()) == 1)
    await until(lambda: open_descriptors() <= before)


_SERVER = """
import asyncio, logging, os, sys, time
from pathlib import Path
from support.workers import Workshop, config_of, run_add_sub
from rocserve.plane.loop import PlaneLoop
from rocserve.workers.control_groups import ControlGroups
from rocserve.workers.launcher import WorkerLauncher

launcher = WorkerLauncher(("numpy",), logging.getLogger())
launcher.start()

async def main():
    plane = PlaneLoop(logging.getLogger())
    plane.start()
    workshop = Workshop(plane, launcher, Path(sys.argv[2]))
    serving = await workshop.serving("stuck", forked=sys.argv[1] == "forked")
    run_add_sub(serving.instances[0])
    loading = workshop.group("load_holds_gil", forked=sys.argv[1] == "forked")
    task = asyncio.create_task(loading.load())
    while not loading.models_of_workers:
        await asyncio.sleep(0.01)
    await workshop.until_stuck(2)
    print(*serving.models_of_workers, *loading.models_of_workers, launcher.zygote.process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.long
def test_all_end_with_the_server_whatever_they_do(tmp_path: Path) -> None:
    """However the workers were started, and however the server ends: four servers concurrently, because most of the
    time is waiting."""
    tests = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent / 'server'}:{os.environ['PYTHONPATH']}"}
    with ExitStack() as ending:
        servers = {}
        for way in itertools.product(("forked", "spawned"), (signal.SIGKILL, signal.SIGTERM)):
            folder = tmp_path / "-".join(map(str, way))
            folder.mkdir()
            command = [sys.executable, "-c", _SERVER, way[0], str(folder)]
            servers[way] = ending.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
            )
        left = {}
        for way, server in servers.items():
            ending.callback(server.kill)
            assert server.stdout is not None
            left[way] = [int(pid) for pid in server.stdout.readline().split()]
            assert len(left[way]) == 3 and all(map(running, left[way])), way
        for (_, end), server in servers.items():
            server.send_signal(end)
        for way, own in left.items():
            wait_until(lambda own=own: not any(map(running, own)), f"the end of what was {way[0]}, by {way[1].name}")


def test_worker_processes_import_little() -> None:
    """A model's own interpreter has only numpy, and asyncio and similar modules cost each worker memory."""
    program = (
        "import sys, rocserve.workers.main\n"
        "third = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in third if not name.startswith('_')), 'asyncio' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "['numpy', 'rocserve'] False"


async def test_lines_of_a_worker_go_to_the_log(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = await workshop.serving("print")
    assert (await run_add_sub(group.instances[0])).error is None
    await group.stop(PATIENCE_SECONDS)
    lines = [record.getMessage() for record in caplog.records]
    for line in ("from print", "to stderr", "from C", "from puts", "after the long line", "closed"):
        assert f"m:1: {line}" in lines
    assert r"m:1: \xff\xfe\x00junk\x1b[2J" in lines
    (long,) = (line for line in lines if "xxxx" in line)
    assert long.endswith("x ... (cut)") and len(long) < 4200
