from __future__ import annotations

import pytest

from benchmarks.load_generator import LoadFailed, Report, frame, parse_log, parse_report, percentile

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
