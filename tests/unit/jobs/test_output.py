"""What a child writes, and what is told of it."""

from __future__ import annotations

import os

from rocserve.jobs.runner import JobOutput


def test_lines_are_taken_as_they_come_and_half_a_line_in_the_end() -> None:
    output = JobOutput()
    os.write(output.descriptor, b"one\ntw")
    assert output.take_lines() == ["one"]
    os.write(output.descriptor, b"o\n\n   \nthree")
    assert output.take_lines() == ["two"]
    assert output.take_lines(ended=True) == ["three"]
    assert output.last_lines == ("one", "two", "three")
    output.close()


def test_what_is_not_text_is_made_visible_and_long_lines_are_cut() -> None:
    output = JobOutput()
    os.write(output.descriptor, b"\x1b[31mred\xff\n" + b"x" * 5000 + b"\n")
    red, cut = output.take_lines()
    assert red == "\\x1b[31mred\\xff"
    assert cut == "x" * 2000 + " ... (cut)"
    output.close()


def test_the_file_does_not_grow_without_end() -> None:
    output = JobOutput()
    line = b"y" * 999 + b"\n"
    for _ in range(4):
        os.write(output.descriptor, line * 5000)
        assert len(output.take_lines()) == 5000
    assert os.fstat(output.descriptor).st_size < 8 << 20
    os.write(output.descriptor, b"after\n")
    assert output.take_lines() == ["after"]
    output.close()


def test_a_line_without_end_is_not_kept_whole() -> None:
    output = JobOutput()
    for _ in range(40):
        os.write(output.descriptor, b"z" * 100_000)
        assert output.take_lines() == []
    (line,) = output.take_lines(ended=True)
    assert line.endswith(" ... (cut)")
    assert len(line) < 3000
    output.close()


def test_only_the_last_lines_are_remembered() -> None:
    output = JobOutput()
    os.write(output.descriptor, b"".join(b"%d\n" % number for number in range(100)))
    output.take_lines()
    assert output.last_lines == tuple(str(number) for number in range(88, 100))
    output.close()
