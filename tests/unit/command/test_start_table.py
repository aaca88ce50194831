"""The table of models that a start prints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.remote_places import parse_remote
from rocserve.core.serving import IndexEntry, ServingTable
from rocserve.settings import RepositorySettings
from rocserve.settings.repository import ControlMode
from rocserve.start_table import print_table, print_way_to_first_model, python_lines


def printed(*rows: IndexEntry) -> list[str]:
    file = io.StringIO()
    print_table(rows, ServingTable(), file)
    return file.getvalue().splitlines()


def row(number: int, state: str = "READY", reason: str = "") -> IndexEntry:
    return IndexEntry(f"m{number}", "1", state, reason)


def test_of_inputs_that_stand_for_each_other_the_first_is_shown() -> None:
    inputs = (
        InputConfig("TEXT", DataType.BYTES, (1,), optional=True),
        InputConfig("IDS", DataType.INT64, (-1,), optional=True),
    )
    config = ModelConfig("m_text", inputs=inputs, outputs=(OutputConfig("EMBEDDING", DataType.FP32, (8,)),))
    assert "client.infer('m_text', {'TEXT': np.full((1,), b'text', 'object')})" in "\n".join(
        python_lines(config, "localhost:8001", takes_files=False)
    )


def test_few_models_have_a_row_each() -> None:
    lines = printed(*(row(number) for number in range(30)))
    assert len(lines) == 30 + 2
    assert lines[0].split() == ["model", "version", "runs", "on", "inputs", "outputs", "state"]


def test_in_a_file_each_model_has_one_line_in_columns() -> None:
    long, wide = IndexEntry("m" * 60, "1", "READY", ""), IndexEntry("\u6a21\u578b\n", "12", "UNAVAILABLE", "")
    assert printed(long, wide) == [
        "model" + " " * 57 + "version  runs on  inputs  outputs  state",
        "m" * 60 + "  1" + " " * 34 + "READY",
        "\u6a21\u578b\\n" + " " * 56 + "12" + " " * 33 + "UNAVAILABLE",
        "",
    ]


def test_names_and_states_are_not_broken_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    text = "\n".join(printed(IndexEntry("fifteen_letters", "1", "UNAVAILABLE")))
    assert all(word in text for word in (" fifteen_letters ", "version", " UNAVAILABLE"))


@pytest.mark.parametrize("broken", [0, 2])
def test_of_many_models_those_that_need_attention_have_a_row(broken: int) -> None:
    rows = [row(number) for number in range(60)]
    failed = [row(100 + number, "UNAVAILABLE", f"reason {number}") for number in range(broken)]
    lines = printed(*rows, *failed)
    assert lines[0] == f"{60 + broken} versions of models, 60 READY; rocserve status lists them"
    names = [line.split()[0] for line in lines if "UNAVAILABLE" in line]
    assert names == [f"m{100 + number}" for number in range(broken)]
    assert [line for line in lines if "reason" in line] == [f"m{100 + n} 1: reason {n}" for n in range(broken)]


def test_a_folder_that_cannot_be_read_has_a_reason_without_a_version() -> None:
    assert "m: bad configuration" in printed(IndexEntry("m", "", "UNAVAILABLE", "bad configuration"))


def test_more_failures_than_a_screen_holds_are_cut() -> None:
    lines = printed(*(row(number, "UNAVAILABLE", "the reason") for number in range(500)))
    assert sum(line.endswith("UNAVAILABLE") for line in lines) == 30


POLL, NONE, EXPLICIT = ControlMode.POLL, ControlMode.NONE, ControlMode.EXPLICIT


@pytest.mark.parametrize(
    ("mode", "rows", "text"),
    [
        (POLL, [], "There is no model yet: put one into models/NAME/1/, for example as model.onnx, and it is served"),
        (NONE, [], "for example as model.onnx, and start the server again."),
        (EXPLICIT, [], "for example as model.onnx, and load it by its name."),
        (
            EXPLICIT,
            [row(2, ""), row(1, "")],
            "No model is loaded; load one with curl -X POST here:8000/v2/repository/models/NAME/load, or at the start"
            " with --load-model=NAME: m1, m2.",
        ),
        (EXPLICIT, [row(2, ""), row(1)], ""),
        (POLL, [row(1, "UNAVAILABLE")], ""),
        (POLL, [row(1, "")], ""),
    ],
)
def test_a_start_without_models_says_how_to_get_one(mode: ControlMode, rows: list[IndexEntry], text: str) -> None:
    file = io.StringIO()
    settings = RepositorySettings(roots=(Path("models"),), control_mode=mode)
    print_way_to_first_model(rows, settings, "here:8000", file)
    assert text in file.getvalue()
    assert bool(text) == bool(file.getvalue())


def test_a_start_on_an_empty_bucket_names_its_url() -> None:
    file = io.StringIO()
    remotes = (parse_remote("s3://bucket/modles"),)
    print_way_to_first_model([], RepositorySettings(roots=(Path("copy"),), remotes=remotes), "here:8000", file)
    assert "put one into s3://bucket/modles/NAME/1/, for example" in file.getvalue()


PHOTO = (InputConfig("ENCODED", DataType.BYTES, (1,)),)


def outputs(**dims: tuple[int, ...]) -> tuple[OutputConfig, ...]:
    names = {"LABEL": DataType.BYTES, "LABELS": DataType.BYTES}
    return tuple(OutputConfig(name, names.get(name, DataType.FP32), sizes) for name, sizes in dims.items())


def test_the_example_of_an_image_model_prints_its_label() -> None:
    config = ModelConfig("m", inputs=PHOTO, outputs=outputs(PROBABILITIES=(1000,), LABEL=(1,), PROBABILITY=(1,)))
    *_, ask, show = python_lines(config, "here:8001", takes_files=True)
    assert ask.endswith(", ['LABEL', 'PROBABILITY'])"), "not a thousand numbers"
    assert show == "print(result['LABEL'])"
    boxes = ModelConfig("m", inputs=PHOTO, outputs=outputs(BOXES=(-1, 4), LABELS=(-1,)))
    *_, ask, show = python_lines(boxes, "here:8001", takes_files=True)
    assert ask.endswith("'object')})")
    assert show == "print(result['LABELS'])"
    *_, ask, show = python_lines(config, "here:8001", takes_files=False)
    assert ask.endswith("'object')})")
    assert show == "print(result['PROBABILITIES'])"
