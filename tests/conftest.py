"""Fixtures and the order of tests, for all kinds of tests."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.server import RocserveProcess, Start
from support.shared_folder import shared_folder
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    import onnx

HERE = Path(__file__).parent
ALL_LONG = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.long\b", re.MULTILINE)
"""What a file has whose tests are all long."""
LONGEST_FILES = (
    "e2e/test_pytorch_engines.py",
    "e2e/test_real_weights.py",
    "unit/backends/test_pytorch_damage.py",
    "unit/tools/test_quantise_tool.py",
    "e2e/test_migraphx.py",
    "e2e/test_migraphx_errors.py",
    "unit/tools/test_bench_tool.py",
    "docs/test_commands.py",
)
"""Files of few tests that each compute for long, the longest first: one process runs a file."""

_HTTP = ("http", "http_bodies", "http_uploads", "infer_streams", "kserve", "page", "reflection", "timing")
OF_ONE_SERVER = {
    "rocserve_server": [f"tests/e2e/test_{name}.py" for name in ("client", "detection", "image_commands", "sample")],
    "front_ends_server": [f"tests/e2e/test_{name}.py" for name in ("front_ends", "http_front_ends")],
    "http_server": [f"tests/e2e/test_{name}.py" for name in _HTTP],
}
"""Fixture of the whole session -> the files that use it: each process would start the server again."""
_ENGINE = ("compiler", "default_sizes", "engine", "engine_program_files", "model_check", "padded_programs")
_PYTORCH = ("backend", "exported_file", "load_check", "package", "padding", "results")
OF_ONE_PROCESS = {
    **OF_ONE_SERVER,
    "migraphx_engine": [
        *(f"tests/unit/backends/migraphx/test_{name}.py" for name in _ENGINE),
        *(f"tests/unit/tools/test_{name}_tool.py" for name in ("compile", "inspect")),
    ],
    "migraphx_contract": ["tests/unit/backends/migraphx/contract/"],
    "page": ["tests/e2e/page/"],
    "parity": ["tests/parity/"],
    "pytorch": [
        "tests/unit/tools/test_quantise_tool.py",
        "tests/unit/backends/test_torch_migraphx.py",
        *(f"tests/unit/backends/test_pytorch_{name}.py" for name in _PYTORCH),
    ],
}
"""Group -> its files, or its folder. They share a server, a process with MIGraphX or PyTorch, a browser, Triton."""

pytest_plugins = ("support.migraphx", "support.pytorch", "support.parity.summary")

# Test processes share the CPUs. Threads of OpenMP would spin while they wait for one that the kernel does not run: 400
# small convolutions then take 40 s instead of half a second. Set before PyTorch is imported; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Under nohup, or in a shell's background, SIGINT is ignored: the processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# On a busy machine any example may take long; and the same commit gets the same examples each time.
settings.register_profile("certain", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("certain")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--front-ends",
        type=int,
        default=0,
        help="front end processes, where a test does not say",
    )


def pytest_configure(config: pytest.Config) -> None:
    RocserveProcess.default_front_ends = config.getoption("front_ends")
    # Neither a slow machine nor chance decides about examples.
    settings.register_profile(
        "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
    )
    settings.load_profile("tests")


def folder_of(path: Path) -> str:
    """The folder of tests/ in which the file lies."""
    return path.parts[len(HERE.parts)]


def group_of(file: str) -> str:
    """The group in OF_ONE_PROCESS of this path from the checkout's folder; else the path, as a group of one file."""
    return next((name for name, files in OF_ONE_PROCESS.items() if any(map(file.startswith, files))), file)


def is_quick(path: Path, config: pytest.Config) -> bool:
    """Whether the file, or its folder, has no tests marked as long."""
    folder = folder_of(path)
    return folder in ("unit", "smoke") or (folder == "parity" and config.getoption("triton") == "recorded")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test for `-m`, half of all: each process imports all that it collects."""
    if HERE not in collection_path.parents:
        return None
    wanted = config.getoption("markexpr")
    if not is_quick(collection_path, config):
        return True if wanted == "not long" else None
    if wanted not in ("long", "not long") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    has_none = "mark.long" not in text if wanted == "long" else ALL_LONG.search(text)
    return True if has_none else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    groups: dict[Path, str] = {}
    for item in items:
        if HERE in item.path.parents and not is_quick(item.path, config):
            item.add_marker(pytest.mark.long)
        group = groups.setdefault(item.path, group_of(item.nodeid.partition("::")[0]))
        item.add_marker(pytest.mark.xdist_group(group))
    # The longest tests begin first, so that no process is left alone with them at the end: tests/parity, which one
    # process runs; files whose tests have their own time limits, longest first; those of LONGEST_FILES; then folders by
    # the number of servers that they start. tests/unit computes and the others mostly wait: from then on each kind has
    # its share of the processes.
    longest = {HERE / name: place for place, name in enumerate(LONGEST_FILES)}
    folders = {name: place for place, name in enumerate(("campaign", "faults", "docs", "e2e", "security"))}
    counts = Counter(item.path for item in items)
    limits = dict.fromkeys(counts, 0.0)
    for item in items:
        limits[item.path] = max([limits[item.path], *(mark.args[0] for mark in item.iter_markers("timeout"))])
        if folder_of(item.path) == "parity":
            limits[item.path] = math.inf

    def place(path: Path) -> tuple[float, int, int, int, Path]:
        folder = folders.get(folder_of(path), len(folders))
        return -limits[path], longest.get(path, len(longest)), folder, -counts[path], path

    shares: dict[bool, list[Path]] = {False: [], True: []}
    # A group has the place of its first file.
    leaders: dict[str, Path] = {}
    for path in sorted(counts, key=place):
        is_first = leaders.setdefault(groups[path], path) == path
        if is_first and not limits[path] and path not in longest:
            shares[folder_of(path) == "unit"].append(path)
    turns = {path: turn / len(share) for share in shares.values() for turn, path in enumerate(share, 1)}

    def when(item: pytest.Item) -> tuple[object, ...]:
        leader = leaders[groups[item.path]]
        return turns.get(leader, 0.0), place(leader), place(item.path)

    items.sort(key=when)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # A million objects that stay: the garbage collector would visit them again and again.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # It need not visit them each time a test calls it either.
    gc.collect()
    gc.freeze()


class FilesTogether(LoadFileScheduling):
    """Hands whole groups of OF_ONE_PROCESS, and other whole files, to the processes of `make test` in their order."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesTogether:
    config.option.loadscopereorder = False
    return FilesTogether(config, log)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A server's log, or a verb of the command, that runs in the test's process sets the level for later tests."""
    log = logging.getLogger("rocserve")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty model repository."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server on a repository with further flags, for all tests of a file."""
    with ExitStack() as running:

        def start(repository: Path, *flags: str) -> RocserveProcess:
            log = tmp_path_factory.mktemp("server") / "log"
            server = running.enter_context(RocserveProcess([repository], *flags, log=log))
            server.wait_until_ready()
            return server

        yield start


@pytest.fixture(scope="session")
def untrained_resnet50(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ResNet-50 with seeded weights. Made once for all pytest processes, because it takes seconds."""
    from benchmarks.networks import resnet50

    return _written(tmp_path_factory, "resnet50", resnet50.build)


@pytest.fixture(scope="session")
def untrained_yolov4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `untrained_resnet50`."""
    from benchmarks.networks import yolov4

    return _written(tmp_path_factory, "yolov4", yolov4.build)


def _written(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[], onnx.ModelProto]) -> Path:
    def write(folder: Path) -> None:
        (folder / "model.onnx").write_bytes(build().SerializeToString())

    return shared_folder(tmp_path_factory, name, write) / "model.onnx"
