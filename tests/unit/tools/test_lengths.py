"""`--lengths`: how laws are read, what is drawn, and which batches a server forms of requests with these lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.padding import NO_PADDING, PaddedDimension, Padding
from rocserve.core.requests import Signature
from rocserve_tools.measuring.candidates import MeasuredInput, OpenCandidate
from rocserve_tools.measuring.lengths import (
    LENGTHS,
    DrawnLengths,
    Law,
    Lognormal,
    Recorded,
    Uniform,
    WrittenLengths,
    by_dimension,
    draw_lengths,
)
from rocserve_tools.measuring.workload import MadeSamples, drawn_lengths, workload


@pytest.mark.parametrize(
    ("text", "label", "law"),
    [
        ("lognormal:median=40,max=512", "", Lognormal(40, 512, 0.8, 1)),
        ("lognormal:max=512,min=8,median=40.5,spread=1", "", Lognormal(40.5, 512, 1.0, 8)),
        ("sequence=lognormal:median=40,max=512", "sequence", Lognormal(40, 512)),
        ("uniform:min=3,max=9", "", Uniform(3, 9)),
        ("IMAGE:1=uniform:min=3,max=9", "IMAGE:1", Uniform(3, 9)),
        ("uniform:1=7", "uniform:1", Uniform(7, 7)),
        ("40", "", Uniform(40, 40)),
        ("sequence=40", "sequence", Uniform(40, 40)),
    ],
)
def test_laws(text: str, label: str, law: Law) -> None:
    assert LENGTHS.read(text) == WrittenLengths(label, law)


def test_a_file_has_a_length_on_each_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("log.txt", "a=b.txt"):
        Path(name).write_text("30\r\n\n 7 \n100")
        assert LENGTHS.read(name) == WrittenLengths("", Recorded([7, 30, 100]))
    assert LENGTHS.read("sequence=log.txt") == WrittenLengths("sequence", Recorded([7, 30, 100]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lognormal:median=40", r"expected lognormal:median=N,max=N\[,spread=0\.8\]\[,min=1\], got 'log"),
        ("lognormal:median=40,max=9,max=99", "expected lognormal:median=N,max=N"),
        ("lognormal", "expected lognormal:median=N,max=N"),
        ("lognormal:median=0.5,max=9", "expected a median between min and max, 1 and 9, got 'lognormal:median=0"),
        ("lognormal:median=10,max=9", "expected a median between min and max, 1 and 9"),
        ("lognormal:median=nan,max=9", "expected a number from 0 to .*, got 'nan' in 'lognormal:median=nan,max=9'"),
        ("lognormal:median=4,max=9,spread=11", "expected a number from 0 to 10, got '11'"),
        ("uniform:min=9,max=3", "expected a max of 9, the min, or more, got 'uniform:min=9,max=3'"),
        ("uniform:min=0,max=3", "expected a length, .* 2147483647, got '0' in 'uniform:min=0,max=3'"),
        ("uniform:max=3,step=2", "expected uniform:min=N,max=N, got 'uniform:max=3,step=2'"),
        ("sequence=0", "expected a length, a whole number from 1 to 2147483647, got '0'$"),
        ("2147483648", "expected a length, a whole number from 1 to 2147483647, got '2147483648'$"),
        ("=4", r"expected \[DIM=\]LAW, got '=4'"),
        ("none.txt", r"a file with a length on each line, got 'none\.txt' \(No such file or directory\)"),
        ("words.txt", r"got 'many' in 'words\.txt, line 3'"),
        ("empty.txt", r"expected a file with a length on each line, got 'empty\.txt', which is empty"),
        ("bytes.bin", r"got 'bytes\.bin' \(it is not text\)"),
    ],
)
def test_what_is_no_law(text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("3\n\nmany\n")
    Path("empty.txt").write_text("\n")
    Path("bytes.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=expected):
        LENGTHS.read(text)


def test_few_lengths_have_the_law_s_median_and_tail() -> None:
    lengths = draw_lengths(Lognormal(40, 512, least=8), 64, "sequence")
    assert median(lengths) == pytest.approx(40, abs=1)
    # exp(0.8^2 / 2) times the median, a little less without the ends.
    assert mean(lengths) == pytest.approx(55, abs=2)
    assert min(lengths) == 8, "a 64th is below 40 exp(-0.8 * 2.15) = 7.1"
    assert 40 * np.exp(0.8 * 2.15) < max(lengths) < 512
    assert max(draw_lengths(Lognormal(40, 100), 64, "sequence")) == 100


def test_all_lengths_of_a_law_are_drawn_equally_often() -> None:
    assert Counter(draw_lengths(Uniform(1, 4), 128, "x")) == dict.fromkeys((1, 2, 3, 4), 32)
    assert Counter(draw_lengths(Recorded([5, 5, 5, 9]), 64, "x")) == {5: 48, 9: 16}


def test_two_runs_draw_the_same_and_more_begin_with_fewer() -> None:
    law = Lognormal(40, 512)
    lengths = draw_lengths(law, 512, "sequence")
    assert lengths == draw_lengths(law, 512, "sequence")
    assert lengths[:100] == draw_lengths(law, 100, "sequence")
    assert lengths != draw_lengths(law, 512, "other"), "two dimensions are independent"
    assert sorted(lengths[:64]) != sorted(lengths[64:128]), "each 64 are other ones"
    assert DrawnLengths.of([3, 4, 9, 1]) == DrawnLengths(4, 3.5, 9)


def test_laws_find_their_dimensions() -> None:
    law, other = Uniform(3, 3), Uniform(4, 4)
    assert by_dimension((WrittenLengths("", law),), ["sequence"], "cpu") == {"sequence": law}
    both = (WrittenLengths("b", law), WrittenLengths("a", other))
    assert by_dimension(both, ["a", "b", "c"], "cpu") == {"b": law, "a": other}
    assert by_dimension((), [], "cpu") == {}


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([""], [], "^cpu: --lengths: expected a model with an open dimension, but this engine runs it"),
        (
            [""],
            ["rows", "sequence"],
            "expected the name of a dimension, such as --lengths 'rows=40'; the open dimensions are: rows, sequence$",
        ),
        (["length"], ["sequence"], "expected the name of an open dimension, got 'length'; the open dim.*: sequence$"),
        (["sequence", ""], ["sequence"], "expected one law for dimension 'sequence', got several"),
    ],
)
def test_laws_without_a_dimension(labels: list[str], names: list[str], expected: str) -> None:
    with pytest.raises(ServeError, match=expected):
        by_dimension([WrittenLengths(label, Uniform(3, 3)) for label in labels], names, "cpu")


@dataclass(frozen=True, slots=True)
class _Workers:
    signature: Signature


def opened(law: Law, batch_size: int, padding: Padding = NO_PADDING, *, keeps_order: bool = False) -> OpenCandidate:
    """An engine with the inputs ids and mask [batch, length], and a third one of a fixed size."""
    rows = (batch_size,) if batch_size else ()
    place = {len(rows): "length"}
    inputs = (
        MeasuredInput("ids", DataType.INT64, (*rows, law.largest), place),
        MeasuredInput("mask", DataType.INT32, (*rows, law.largest), place),
        MeasuredInput("scale", DataType.FP32, (*rows, 2)),
    )
    workers: Any = _Workers(Signature((), (), supports_batching=True, padding=padding))
    return OpenCandidate("", {batch_size: inputs}, workers, {"length": law}, keeps_order)


def padded(*sizes: int, value: float = 0.0) -> Padding:
    places = {"ids": (1,), "mask": (1,)}
    return Padding((PaddedDimension("length", sizes, places),), {"ids": value} if value else {})


def test_requests_of_unlike_lengths_run_alone_if_nothing_is_padded() -> None:
    made = workload(opened(Uniform(1, 64), 4), 4)
    assert made.padded is None
    drawn = draw_lengths(Uniform(1, 64), 128, "length")
    assert [of["length"] for batch in made.batches for of in batch.lengths] == drawn, "in their order"
    assert all(len({of["length"] for of in batch.lengths}) == 1 for batch in made.batches)
    assert made.rows == 128 / len(made.batches)


def test_equal_lengths_fill_batches() -> None:
    made = workload(opened(Uniform(5, 5), 4), 4)
    assert [(len(batch.lengths), dict(batch.sizes)) for batch in made.batches] == [(4, {"length": 5})] * 32
    assert (made.rows, made.padded) == (4.0, None)


def test_each_padded_request_runs_once_in_its_bucket_or_a_larger_one() -> None:
    law = Lognormal(20, 64)
    made = workload(opened(law, 16, padded(8, 16, 32, 64)), 16)
    ran = [of["length"] for batch in made.batches for of in batch.lengths]
    assert sorted(ran) == sorted(draw_lengths(law, 128, "length"))
    for batch in made.batches:
        assert len(batch.lengths) <= 16
        assert max(of["length"] for of in batch.lengths) <= batch.sizes["length"] in (8, 16, 32, 64)
    filled = sum(len(batch.lengths) * batch.sizes["length"] for batch in made.batches)
    assert made.padded == pytest.approx((filled - sum(ran)) / sum(ran))
    assert 4 < made.rows <= 16, "most requests have company"


def test_what_is_padded_at_one_length() -> None:
    made = workload(opened(Uniform(5, 5), 2, padded(8, 16)), 2)
    assert made.padded == pytest.approx(3 / 5)
    assert workload(opened(Uniform(8, 8), 2, padded(8, 16)), 2).padded == 0


def test_a_server_that_keeps_the_order_forms_smaller_batches() -> None:
    law, sizes = Uniform(1, 64), padded(8, 16, 32, 64)
    free, ordered = (workload(opened(law, 16, sizes, keeps_order=keeps), 16) for keeps in (False, True))
    assert ordered.rows < free.rows
    assert [of["length"] for batch in ordered.batches for of in batch.lengths] == draw_lengths(law, 128, "length")


def test_the_inputs_of_a_padded_batch() -> None:
    candidate = opened(Recorded([3, 6]), 4, padded(8, value=7.0))
    made = workload(candidate, 4)
    samples = MadeSamples(made, candidate.inputs[4])
    assert len(samples) == len(made.batches) == 32
    for batch, sample in zip(made.batches, samples, strict=True):
        assert {name: (array.shape, str(array.dtype)) for name, array in sample.items()} == {
            "ids": ((4, 8), "int64"), "mask": ((4, 8), "int32"), "scale": ((4, 2), "float32"),
        }  # fmt: skip
        for row, lengths in enumerate(batch.lengths):
            own = lengths["length"]
            assert set(sample["ids"][row, :own]) <= {0, 1}
            assert set(sample["ids"][row, own:]) == {7}
            assert sample["mask"][row].tolist() == [1] * own + [0] * (8 - own)
    for once, again in zip(samples, samples, strict=True):
        assert all(np.array_equal(once[name], again[name]) for name in once)


def test_a_model_that_does_not_batch_gets_one_request_at_a_time() -> None:
    candidate = opened(Recorded([3, 6]), 0)
    made = workload(candidate, 0)
    assert (len(made.batches), made.rows) == (128, 1.0)
    shapes = Counter(sample["ids"].shape for sample in MadeSamples(made, candidate.inputs[0]))
    assert shapes == {(3,): 64, (6,): 64}
    assert drawn_lengths(candidate) == {"length": DrawnLengths(128, 4.5, 6)}
