from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.environments import PeerUnavailable
from benchmarks.front_ends import IMAGE_SOURCE, Result, parse_server, subjects, table
from benchmarks.ratios import Measurement
from benchmarks.triton_peer import default_cache_folder, provision

ROOT = Path(__file__).resolve().parents[3]


def result(round_: int, server: str, rate: float | None, cpu: float = 1e-4) -> Result:
    measured = None if rate is None else Measurement(rate, p50=2e-3, p99=3e-3, cpu=cpu)
    return Result("add/sub", round_, server, measured, {"python": [0.9], "rocserve:add": [0.25, 0.5, 0.001]})


def test_ratios_are_formed_within_rounds_and_failures_are_marked() -> None:
    results = [
        result(0, "old", 100.0),
        result(0, "new", 300.0, cpu=5e-5),
        result(1, "old", None),
        result(1, "new", 400.0, cpu=5e-5),
        result(0, "late", None),
    ]
    rows = [
        [cell.strip() for cell in line.split("|")[2:-1]] for line in table(results, ["old", "new", "late"]).splitlines()
    ]
    processes = "python 0.90; rocserve:add 0.50 0.25"
    assert rows[2] == ["old", "100 (failed)", "100 to 100", "1.00", "100", "1.00", "2.00", "1.65", processes]
    assert rows[3] == ["new", "350", "300 to 400", "3.00", "50", "0.50", "2.00", "1.65", processes]
    assert rows[4] == ["late", "failed", *["-"] * 7]


def test_a_server_is_a_name_a_checkout_and_flags() -> None:
    assert parse_server(f"new={ROOT} --id=a --log-verbose=1") == ("new", ROOT, ["--id=a", "--log-verbose=1"])
    for text in ("new", "new=", f"new={ROOT / 'docs'}"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=TREE"):
            parse_server(text)


def test_the_image_model_answers_each_request_of_a_batch_with_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured model takes pixels of 0 to 63, and returns the first 4000 as floats."""
    backend = types.ModuleType("triton_python_backend_utils")
    backend.get_input_tensor_by_name = lambda request, name: types.SimpleNamespace(as_numpy=lambda: request[name])  # type: ignore[attr-defined]
    backend.Tensor = lambda name, array: (name, array)  # type: ignore[attr-defined]
    backend.InferenceResponse = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    names: dict[str, type] = {}
    exec(IMAGE_SOURCE, names)
    (image,) = [subject for subject in subjects((4,), python=True) if subject.group == "image"]
    pixels = numpy.random.default_rng(0).integers(0, 64, (3, 224, 224, 3), dtype=numpy.uint8)
    responses = names["TritonPythonModel"]().execute([{"IMAGE": pixels[:1]}, {"IMAGE": pixels[1:]}])
    first, others = (dict(response.output_tensors)["LOGITS"] for response in responses)
    numpy.testing.assert_array_equal(first.tobytes(), pixels[0].tobytes()[:4000])
    numpy.testing.assert_array_equal(others[1].tobytes(), pixels[2].tobytes()[:4000])
    sent = numpy.frombuffer(service_pb2.ModelInferRequest.FromString(image.message).raw_input_contents[0], numpy.uint8)
    (right,) = names["TritonPythonModel"]().execute([{"IMAGE": sent.reshape(1, 224, 224, 3)}])
    image.check(dict(right.output_tensors))
    with pytest.raises(AssertionError):
        image.check({"LOGITS": first})


@pytest.mark.long
@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load (nghttp2-client) is not installed")
def test_servers_on_ports_and_unix_sockets_are_compared_with_a_real_triton_if_there_is_one(tmp_path: Path) -> None:
    sockets = {protocol: f"unix:{tmp_path}/{protocol}" for protocol in ("grpc", "http")}
    flags = " ".join(f"--{protocol}-address={address}" for protocol, address in sockets.items())
    case = ("--only=add_sub,http", "--instances=1", "--in-flight=2", "--rounds=1", "--seconds=0.1")
    command = [sys.executable, "-m", "benchmarks.front_ends", f"--server=tcp={ROOT}", f"--server=unix={ROOT} {flags}"]
    command.append(f"--folder={tmp_path}")
    servers = ["tcp", "unix"]
    with suppress(PeerUnavailable):
        provision(default_cache_folder())
        servers.insert(0, "triton")
        command.append("--triton")
    printed = subprocess.run([*command, *case], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")][2:]
    assert [row[2] for row in rows] == servers * 2
    assert [row[5] for row in rows[:: len(servers)]] == ["1.00"] * 2
    log = (tmp_path / "unix.log").read_text()
    assert [address for address in sockets.values() if f"Service at {address}" not in log] == []
