"""The last lines of each model's workers, bounded for each model and for all together."""

from __future__ import annotations

from rocserve.workers.recent_lines import RecentLines


def texts(lines: RecentLines, model: str) -> list[str]:
    return [line.text for line in lines.of(model)]


def test_the_last_two_hundred_of_each_model() -> None:
    lines = RecentLines()
    for number in range(250):
        lines.add("m", "INFO", str(number))
    lines.add("other", "ERROR", "one")
    assert texts(lines, "m") == [str(number) for number in range(50, 250)]
    assert [(line.level, line.text) for line in lines.of("other")] == [("ERROR", "one")]
    assert texts(lines, "nothing") == []


def test_models_that_write_much_take_the_room_of_the_silent_ones() -> None:
    lines = RecentLines(most_characters=100)
    lines.add("silent", "INFO", "a" * 30)
    lines.add("silent", "INFO", "b" * 30)
    lines.add("loud", "INFO", "c" * 60)
    assert texts(lines, "silent") == ["b" * 30]
    lines.add("loud", "INFO", "d" * 90)
    assert texts(lines, "silent") == []
    assert texts(lines, "loud") == ["d" * 90]


def test_models_that_share_a_process_share_its_lines() -> None:
    lines = RecentLines()
    lines.share("one", "both")
    lines.add("both", "INFO", "of both")
    lines.share("other", "both")
    lines.add("one", "INFO", "of before")
    assert (texts(lines, "one"), texts(lines, "other")) == (["of both"], ["of both"])
    lines.share("one", "one")
    assert texts(lines, "one") == ["of before"]
