"""The packages that `make dist` builds, installed into an environment without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import distribution, distributions
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from tritonclient.grpc import InferRequestedOutput

import rocserve

ROOT = Path(__file__).parents[2]
PHOTO = ROOT / "tests/data/digits/0002_two.jpg"
BARE = {"PYTHONPATH": ""}


def run(*command: str | Path, folder: Path) -> str:
    environment = {**os.environ, **BARE}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


GET = "from pathlib import Path; from rocserve_tools.get.verb import copy_samples; copy_samples('resnet50', Path())"


def test_the_wheel_serves_an_image_with_what_get_brings(tmp_path: Path, untrained_resnet50: Path) -> None:
    # The wheel is built from the source distribution, which must be complete.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", folder=ROOT)
    wheel, sdist = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert sdist.name.endswith(".tar.gz")
    environment = tmp_path / "bare"
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    # Dependencies come from this environment, without the editable checkout in it.
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    rocserve = environment / "bin" / "rocserve"
    # Found by the entry point of the wheel.
    assert "time a model in its engine" in run(rocserve, "--help", folder=tmp_path)
    repository = tmp_path / "model_repository"
    repository.mkdir()
    run(python, "-c", GET, folder=repository)
    (repository / "resnet50" / "1").mkdir()
    shutil.copy(untrained_resnet50, repository / "resnet50" / "1" / "model.onnx")
    bench = run(rocserve, "bench", "--seconds=0", "--batch-sizes=1", repository / "resnet50", folder=tmp_path)
    assert "ONNX Runtime" in bench
    log = tmp_path / "server.log"
    with RocserveProcess([], str(repository), log=log, environment=BARE, python=str(python)) as server:
        server.wait_until_ready()
        assert "/bare/" in run(python, "-c", "import rocserve; print(rocserve.__file__)", folder=tmp_path)
        entry = infer_input("ENCODED", np.array([[PHOTO.read_bytes()]], object))
        wanted = InferRequestedOutput("PROBABILITIES", class_count=1)
        answer = server.client().infer("classify_image", [entry], outputs=[wanted]).as_numpy("PROBABILITIES")
        assert len(answer[0, 0].split(b":")) == 3, "probability, number and label"


ASK = """
import sys
from importlib.metadata import distributions
import numpy as np
import rocserve_client
with rocserve_client.Client(sys.argv[1]) as client:
    print(client.infer("m", {"X": np.array([[1, 2]], np.float32)})["Y"].tolist())
print(rocserve_client.__file__)
print(*sorted(each.name for each in distributions()))
"""
NEEDED = ("grpcio", "numpy", "protobuf")


def test_the_clients_wheel_needs_three_packages(
    serve: Callable[..., RocserveProcess], repository: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, "clients", folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    environment = tmp_path / "bare"
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    packages = next(environment.glob("lib/python*/site-packages"))
    (metadata,) = distributions(name="rocserve_client", path=[str(packages)])
    assert metadata.version == rocserve.__version__
    assert sorted(one.name for one in map(Requirement, metadata.requires or ())) == list(NEEDED)
    # What they need is installed here; nothing else of this environment is in that one.
    lacking = list(NEEDED)
    while lacking:
        found = distribution(lacking.pop())
        requirements = map(Requirement, found.requires or ())
        lacking += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {Path(str(file)).parts[0] for file in found.files or ()} - {".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))
    drop(repository, "m", add_constant(1.0))
    server = serve(repository)
    server.wait_until_ready()
    answer, place, installed = run(python, "-c", ASK, server.address, folder=tmp_path).splitlines()
    assert answer == "[[2.0, 3.0]]"
    assert place.startswith(str(packages))
    assert set(installed.split()) == {*NEEDED, "rocserve-client", "typing_extensions"}
