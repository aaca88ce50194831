"""What is said behind a name that nobody knows."""

from __future__ import annotations

from rocserve.core.hints import names_hint


def test_the_names_that_there_are_and_the_one_that_was_meant() -> None:
    assert names_hint("its inputs are", "image", ["size", "images"]) == (
        "; its inputs are: images, size; did you mean 'images'?"
    )
    assert names_hint("its inputs are", "x", ["images", "size"]) == "; its inputs are: images, size"
    assert names_hint("its inputs are", "image", ["images"]) == "; its inputs are: images"
    assert names_hint("its inputs are", "image", []) == ""


def test_of_many_names_some_are_listed_and_few_compared() -> None:
    many = [f"model_{number:03}" for number in range(100)]
    assert names_hint("served are", "model_01", many) == (
        "; served are: model_000, model_001, model_002, model_003, model_004, model_005, model_006, model_007, and 92"
        " more; did you mean 'model_015'?"
    )
    assert "did you mean" not in names_hint("served are", "x" * 100_000, many)
