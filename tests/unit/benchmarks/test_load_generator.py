from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.cases import add_sub_cases, identity_cases, infer_request
from benchmarks.load_generator import LoadFailed, Report, frame, parse_log, parse_report, percentile
from benchmarks.probe import run_problem
from benchmarks.server_process import ServerFailed, ServerProcess, free_port

PRINTED = """\
starting benchmark...
Application protocol: h2c

finished in 2.00s, 6014.00 req/s, 1.36MB/s
requests: 12028 total, 12029 started, 12020 done, 12019 succeeded, 1 failed, 2 errored, 3 timeout
status codes: 12028 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 2.72MB (2850882) total, 35.31KB (36159) headers (space savings 96.29%), 2.21MB (2321404) data
                     min         max         mean         sd        +/- sd
time for request:      103us     17.53ms       160us       211us    99.79%
"""


def test_the_totals_are_read() -> None:
    assert parse_report(PRINTED) == Report(
        seconds=2.0, done=12020, succeeded=12019, failed=1, errored=2, timed_out=3, body_bytes=2321404
    )


def test_a_duration_below_a_second_is_read() -> None:
    assert parse_report(PRINTED.replace("in 2.00s", "in 501.25ms")).seconds == pytest.approx(0.50125)


def test_a_small_body_without_unit_is_read() -> None:
    assert parse_report(PRINTED.replace("2.21MB (2321404)", "193B (193)")).body_bytes == 193


@pytest.mark.parametrize("word", ["finished", "requests", "traffic"])
def test_a_missing_line_is_an_error(word: str) -> None:
    with pytest.raises(LoadFailed, match="printed no line"):
        parse_report("\n".join(line for line in PRINTED.splitlines() if not line.startswith(word)))


def test_the_log_gives_seconds() -> None:
    rows = ["1795231352802150\t200\t17533\n", "1795231352819717\t200\t159\n"]
    assert parse_log(rows) == pytest.approx([0.017533, 0.000159])


@pytest.mark.parametrize("status", ["-1", "503"])
def test_a_failed_request_in_the_log_is_an_error(status: str) -> None:
    with pytest.raises(LoadFailed, match=f"HTTP status {status}"):
        parse_log(["1\t200\t5\n", f"2\t{status}\t5\n"])


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.501, 51.0), (0.99, 99.0), (1.0, 100.0)])
def test_percentiles_are_the_nearest_rank(fraction: float, expected: float) -> None:
    assert percentile([float(value) for value in range(1, 101)], fraction) == expected


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


def test_a_frame_is_flag_and_big_endian_length() -> None:
    assert frame(b"x" * 258) == b"\x00\x00\x00\x01\x02" + b"x" * 258


GOOD = {"succeeded": 100, "failed": 0, "body_bytes": 19_300, "done": 100, "in_flight": 8, "answer_bytes": 193}


def test_a_run_without_errors_has_no_problem() -> None:
    assert run_problem(**GOOD) == ""


def test_requests_cut_off_at_the_end_are_no_problem() -> None:
    assert run_problem(**{**GOOD, "succeeded": 104, "failed": 4, "body_bytes": 19_300 + 4 * 193}) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"succeeded": 99}, "counts 99 successes"),
        ({"failed": 9}, "counts 9 failures"),
        ({"body_bytes": 19_300 - 193}, "19107 bytes"),
        ({"body_bytes": 19_300 + 9 * 193}, "21037 bytes"),
    ],
)
def test_errors_behind_http_status_200_are_seen(change: dict[str, int], words: str) -> None:
    assert words in run_problem(**{**GOOD, **change})


def test_a_request_carries_names_types_shapes_and_bytes() -> None:
    array = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
    request = service_pb2.ModelInferRequest.FromString(infer_request("m", {"A": array, "B": array.astype("float32")}))
    assert request.model_name == "m"
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("A", "INT32", [2, 3]),
        ("B", "FP32", [2, 3]),
    ]
    assert request.raw_input_contents[0] == array.tobytes()


def test_bytes_elements_have_their_length_in_front() -> None:
    array = numpy.array([[b"jpeg"]], dtype=numpy.object_)
    request = service_pb2.ModelInferRequest.FromString(infer_request("m", {"A": array}))
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1, 1])
    assert request.raw_input_contents[0] == b"\x04\x00\x00\x00jpeg"


def test_checks_refuse_wrong_answers() -> None:
    wrong = {"OUTPUT0": numpy.zeros((1, 16), numpy.int32), "OUTPUT1": numpy.zeros((1, 16), numpy.int32)}
    with pytest.raises(AssertionError):
        add_sub_cases("add_sub")[0].check(wrong)
    with pytest.raises(KeyError):
        identity_cases()[0].check({})


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = ServerProcess("peer", command, free_port(), tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"(?s)peer ended with status 3.*no such model"), server:
        pass


def test_a_free_port_is_given_to_no_connection_meanwhile() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < max(first_of_kernel, 20_000)
    assert any(map(can_be_bound, ports)), "another process may take one of them meanwhile"


def can_be_bound(port: int) -> bool:
    with socket.socket() as taken, suppress(OSError):
        taken.bind(("", port))
        return True
    return False
