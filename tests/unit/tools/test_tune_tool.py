from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.encoders import encoder
from support.full_disk import full_disk
from support.migraphx_models import mlp
from support.models import drop, graph
from support.tools import Command

from rocserve.config.pbtxt import parse_model_config
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.repository import machine
from rocserve.repository.machine import ThisMachine
from rocserve_tools.measuring.curves import Box, Label, draw_labels, new_curves
from rocserve_tools.measuring.figures import LatencySummary, summarise
from rocserve_tools.tune.config_text import ServingChoice, with_choice
from rocserve_tools.tune.plot import draw
from rocserve_tools.tune.sweep import Measurement, Sweep, setting
from rocserve_tools.tune.verb import knee, recommend

pytestmark = pytest.mark.long

_PNG = b"\x89PNG\r\n\x1a\n"


def _measured(batch_size: int, instances: int, p95: float, throughput: float) -> Measurement:
    return Measurement(batch_size, instances, LatencySummary(10, p95, p95, p95, p95, p95, 0.0), throughput, batch_size)


_CURVE = [
    # A run costs 5 ms and 1 ms a row.
    _measured(size, 1, 5.0 + size, 1000 * size / (5.0 + size))
    for size in (1, 2, 4, 8, 16, 32, 64)
]


def test_statistics_of_latencies() -> None:
    summary = summarise([0.001 * value for value in range(1, 101)])
    assert summary.runs == 100
    assert summary.min == pytest.approx(1.0)
    assert summary.mean == pytest.approx(50.5)
    assert summary.p50 == pytest.approx(50.5)
    assert summary.p95 == pytest.approx(95.05)
    assert summary.p99 == pytest.approx(99.01)
    assert summary.std == pytest.approx(28.866, abs=1e-3)


class TestRecommendation:
    def test_the_knee_gives_up_little_throughput_for_much_latency(self) -> None:
        best, reason = recommend(_CURVE, None)
        assert (best.batch_size, best.instances) == (16, 1)
        assert reason.startswith("the knee of the curve")

    def test_a_second_setting_is_taken_only_where_it_is_worth_its_latency(self) -> None:
        first = _measured(1, 1, 10.0, 100.0)
        assert knee([first, _measured(2, 1, 10.5, 190.0)]).batch_size == 2
        assert knee([first, _measured(2, 1, 20.0, 101.0)]).batch_size == 1
        assert knee([first]) is first

    def test_settings_that_another_one_beats_are_no_candidates(self) -> None:
        slow = _measured(4, 2, 30.0, 300.0)
        late = _measured(4, 1, 60.0, _CURVE[-1].throughput)
        assert knee([slow, late, *_CURVE]) is knee(_CURVE)

    def test_within_a_budget_the_highest_throughput(self) -> None:
        best, reason = recommend(_CURVE, 15.0)
        assert best.batch_size == 8
        assert reason == "the highest throughput with a p95 latency within 15 ms"

    def test_nothing_is_within_the_budget(self) -> None:
        with pytest.raises(ValueError, match=r"within 2 ms; the least is 6\.000 ms, of batch size 1, 1 instance"):
            recommend(_CURVE, 2.0)

    def test_words(self) -> None:
        assert setting(_measured(8, 2, 1.0, 1.0)) == "batch size 8, 2 instances"
        assert setting(_measured(0, 1, 1.0, 1.0)) == "1 instance"
        padded = replace(_measured(8, 2, 1.0, 1.0), sizes="sequence=16,24")
        assert setting(padded) == 'batch size 8, 2 instances, sizes "sequence=16,24"'


class TestPlot:
    def test_is_a_picture(self, tmp_path: Path) -> None:
        path = tmp_path / "curve.png"
        more = [_measured(one.batch_size, 2, one.latency.p95 * 1.3, one.throughput * 1.5) for one in _CURVE]
        padded = [replace(one, sizes="sequence=16,24", padded=0.2) for one in more]
        draw([*_CURVE, *more, *padded], more[3], title="m on ref", latency_budget_ms=20.0, path=path)
        assert path.read_bytes()[:8] == _PNG

    def test_labels_of_crowded_points_do_not_overlap(self) -> None:
        figure, axes = new_curves("crowded")
        # Four lines whose first points lie within a few pixels of each other.
        lines = [[(1 + 0.01 * line + size, 100 * size + 3 * line) for size in range(1, 6)] for line in range(4)]
        for line in lines:
            axes.plot(*zip(*line, strict=True))
        axes.set_xlim(0, 100)
        labels = [Label(str(2**place), point, "black") for line in lines for place, point in enumerate(line)]
        places = draw_labels(figure, axes, labels, lines)
        assert len(places) == 20
        assert not [1 for one, other in combinations(places, 2) if one.shared(other)]
        bounds = axes.get_window_extent()
        inside = Box(bounds.x0, bounds.y0, bounds.x1, bounds.y1)
        assert all(inside.shared(place) == pytest.approx(place.shared(place)) for place in places)
        # What was placed is what is drawn.
        drawn = [text for text in axes.texts if text.get_text()]
        figure.draw_without_rendering()
        for text, place in zip(drawn, places, strict=True):
            extent = text.get_window_extent()
            assert place.left - 1 < extent.x0 < extent.x1 < place.right + 1
            assert place.bottom - 1 < extent.y0 < extent.y1 < place.top + 1

    def test_where_a_line_crosses_a_box(self) -> None:
        box = Box(0, 0, 2, 1)
        assert box.crossed((-1, 0.5), (3, 0.5))
        assert box.crossed((1, -1), (1, 3))
        assert box.crossed((0.5, 0.5), (0.6, 0.6))
        assert not box.crossed((-1, 2), (3, 2))
        assert not box.crossed((-1, 0), (0.5, 3))
        assert not box.crossed((3, 0.5), (4, 0.5))

    def test_a_budget_far_beyond_what_was_measured(self, tmp_path: Path) -> None:
        path = tmp_path / "curve.png"
        draw(_CURVE[:2], _CURVE[0], title="m", latency_budget_ms=6e7, path=path)
        assert path.read_bytes()[:8] == _PNG

    def test_of_one_point_without_a_batch(self, tmp_path: Path) -> None:
        path = tmp_path / "curve.png"
        only = _measured(0, 1, 3.0, 300.0)
        draw([only], only, title="m", latency_budget_ms=None, path=path)
        assert path.read_bytes()[:8] == _PNG

    @pytest.mark.parametrize("before", [b"", b"an earlier curve"])
    def test_a_full_disk_leaves_no_part_of_it(self, tmp_path: Path, before: bytes) -> None:
        path = tmp_path / "curve.png"
        if before:
            path.write_bytes(before)
        with full_disk(), pytest.raises(ServeError, match=f"^cannot write {path}: File too large$"):
            draw(_CURVE, _CURVE[0], title="m", latency_budget_ms=None, path=path)
        assert [one.read_bytes() for one in tmp_path.iterdir()] == ([before] if before else [])


_CHOICE = ServingChoice(2, 4, (1, 2, 4))


class TestConfigText:
    def test_what_is_there_is_changed_in_its_place_and_comments_stay(self) -> None:
        text = """# my model
backend: "onnx"   # on MIGraphX
max_batch_size : 64; # was 32
input [ { name: "x # no comment", data_type: TYPE_FP32, dims: [ 3, -1 ] } ]
instance_group [
  { # one for each GPU
    kind: KIND_GPU, count: 1, gpus: [ 0, 1 ]
  }
]
dynamic_batching < preferred_batch_size: [ 16, 64 ] max_queue_delay_microseconds: 100 >
parameters { key: 'target' value { string_value: "batch_sizes" } }
parameters: { key: "batch_sizes", value: { string_value: "1,"
   "64" } }
"""
        changed = with_choice(text, _CHOICE, "config.pbtxt")
        assert changed == text.replace("max_batch_size : 64", "max_batch_size : 4").replace(
            "count: 1", "count: 2"
        ).replace("[ 16, 64 ]", "[ 4 ]").replace('"1,"\n   "64"', '"1,2,4"')
        # A second run changes nothing.
        assert with_choice(changed, _CHOICE, "config.pbtxt") == changed

    def test_what_is_not_there_is_added_at_the_end(self) -> None:
        changed = with_choice('backend: "onnx"  # mine', _CHOICE, "config.pbtxt")
        assert changed == (
            'backend: "onnx"  # mine\n'
            "instance_group [ { count: 2 } ]\n"
            "max_batch_size: 4\n"
            "dynamic_batching { preferred_batch_size: [ 4 ] }\n"
            'parameters { key: "batch_sizes" value: { string_value: "1,2,4" } }\n'
        )

    def test_into_messages_that_lack_the_field(self) -> None:
        changed = with_choice("instance_group { kind: KIND_CPU }\ndynamic_batching {}\n", _CHOICE, "config.pbtxt")
        assert changed.startswith(
            "instance_group { count: 2 kind: KIND_CPU }\ndynamic_batching { preferred_batch_size: [ 4 ]}\n"
        )
        message = parse_model_config(changed, "config.pbtxt")
        assert (message.instance_group[0].count, message.max_batch_size) == (2, 4)

    def test_a_model_that_does_not_batch_gets_instances_only(self) -> None:
        assert with_choice("max_batch_size: 0\n", ServingChoice(3), "config.pbtxt") == (
            "max_batch_size: 0\ninstance_group [ { count: 3 } ]\n"
        )

    def test_a_list_of_parameters_in_brackets(self) -> None:
        text = 'parameters [ { key: "a" value { } }, { key: "batch_sizes" value { string_value: "9" } } ]'
        changed = with_choice(text, _CHOICE, "config.pbtxt")
        assert parse_model_config(changed, "c").parameters["batch_sizes"].string_value == "1,2,4"
        assert changed.count("batch_sizes") == 1

    def test_sizes_that_requests_are_padded_to(self) -> None:
        choice = ServingChoice(1, 4, sizes="sequence=16,24")
        line = 'parameters { key: "sizes" value: { string_value: "sequence=16,24" } }\n'
        assert with_choice("max_batch_size: 4\n", choice, "config.pbtxt").endswith(line)
        text = 'parameters { key: "sizes" value { string_value: "rows=1" } } # mine\n'
        assert with_choice(text, choice, "config.pbtxt").startswith(text.replace("rows=1", "sequence=16,24"))

    def test_a_preferred_size_that_is_no_list(self) -> None:
        changed = with_choice("dynamic_batching { preferred_batch_size: 8 }", _CHOICE, "config.pbtxt")
        assert changed.startswith("dynamic_batching { preferred_batch_size: [ 4 ] }")

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("instance_group [ { count: 1 }, { count: 2 } ]", "it has 2 instance groups, and which of them"),
            ("max_batch_sise: 1", "unknown field 'max_batch_sise'"),
            (
                "dynamic_batching { preferred_batch_size: 4 preferred_batch_size: 8 }",
                "it has preferred_batch_size 2 times; write it once",
            ),
        ],
    )
    def test_refusals(self, text: str, error: str) -> None:
        with pytest.raises(ServeError, match=error):
            with_choice(text, _CHOICE, "config.pbtxt")


_QUICK = ("--seconds", "0", "--repeats", "4", "--warm-up", "1")


def _refuse_to_measure(*_: object) -> None:
    raise invalid_argument("it is measured")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "scorer"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(mlp())
    (folder / "config.pbtxt").write_text('# Scores.\nplatform: "onnx_onnxv1"\nmax_batch_size: 8 # rows\n')
    return folder


class TestVerb:
    def test_sweeps_recommends_draws_and_writes(self, command: Command, folder: Path, tmp_path: Path) -> None:
        ran = command(
            "tune", folder, "--engine", "onnxruntime", "--batch-sizes", "1,2", "--instances", "1,2", *_QUICK,
            "--latency-budget-ms", "60000", "--plot", tmp_path / "curve.png", "--write",
        )  # fmt: skip
        assert ran.status == 0
        rows = [line.split() for line in ran.out.splitlines() if line.strip()[:1] in ("1", "2")]
        assert [row[:3] for row in rows] == [["1", "1", "4"], ["1", "2", "4"], ["2", "1", "8"], ["2", "2", "8"]]
        (best,) = [row for row in rows if "recommended" in row]
        assert "the highest throughput with a p95 latency within 60000 ms\n" in ran.out
        assert (tmp_path / "curve.png").read_bytes()[:8] == _PNG
        written = (folder / "config.pbtxt").read_text()
        message = parse_model_config(written, "config.pbtxt")
        assert written.startswith('# Scores.\nplatform: "onnx_onnxv1"\n')
        assert (message.instance_group[0].count, message.max_batch_size) == (int(best[0]), int(best[1]))
        assert list(message.dynamic_batching.preferred_batch_size) == [int(best[1])]
        assert "batch_sizes" not in message.parameters, "ONNX Runtime compiles nothing ahead"
        assert f"max_batch_size was 8: requests of more than {best[1]} rows will be refused from now on\n" in ran.out
        assert f"written: {folder}/config.pbtxt\n" in ran.out

    def test_on_migraphx_the_batch_sizes_are_written_too(
        self, migraphx_root: Path, command: Command, folder: Path
    ) -> None:
        ran = command.on_migraphx(
            migraphx_root, "tune", folder, "--target", "ref", "--batch-sizes", "1,2", "--instances", "1,2", *_QUICK,
            "--latency-budget-ms", "60000", "--write", "--json",
        )  # fmt: skip
        assert ran.status == 0
        result = json.loads(ran.out)
        assert [(one["instances"], one["batch_size"]) for one in result["measurements"]] == [
            (1, 1), (1, 2), (2, 1), (2, 2),
        ]  # fmt: skip
        best = result["recommended"]["batch_size"]
        message = parse_model_config((folder / "config.pbtxt").read_text(), "config.pbtxt")
        assert message.parameters["batch_sizes"].string_value == ("1" if best == 1 else "1,2")
        assert message.instance_group[0].count == result["recommended"]["instances"]
        assert "as it is configured, a server here runs it on onnxruntime: what was measured takes" in ran.err

    def test_nothing_within_the_budget_writes_nothing(self, command: Command, folder: Path) -> None:
        before = (folder / "config.pbtxt").read_text()
        ran = command(
            "tune", folder, "--engine", "onnxruntime", "--batch-sizes", "1", "--instances", "1", *_QUICK,
            "--latency-budget-ms", "0.001", "--write", "--json",
        )  # fmt: skip
        assert (ran.status, ran.out) == (1, "")
        assert "no setting has a p95 latency within 0.001 ms; the least is " in ran.err
        assert (folder / "config.pbtxt").read_text() == before

    def test_json_stands_alone_on_standard_output(self, command: Command, folder: Path, tmp_path: Path) -> None:
        words = ("--engine", "onnxruntime", "--batch-sizes", "2", "--instances", "1", *_QUICK, "--json", "--write")
        ran = command("tune", folder, *words, "--plot", tmp_path / "curve.png")
        assert json.loads(ran.out)["recommended"]["batch_size"] == 2
        for told in ("curve: ", "max_batch_size was 8: requests of more than 2 rows", "written: "):
            assert told in ran.err

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (("--plot", "curve.pdf"), "--plot: expected a name that ends in .png, got 'curve.pdf'"),
            (("--plot", "/nowhere/curve.png"), "--plot: the folder /nowhere does not exist"),
        ],
    )
    def test_what_cannot_be_written_is_said_before_anything_is_measured(
        self, command: Command, folder: Path, words: tuple[str, ...], error: str
    ) -> None:
        ran = command("tune", folder, *words)
        assert (ran.status, ran.out) == (1, "")
        assert ran.err.splitlines()[-1].endswith(error)

    @pytest.mark.parametrize(("gpus", "most"), [((), 16), ((0, 1), 64)])
    def test_no_more_instances_than_a_server_has(
        self, command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], most: int
    ) -> None:
        monkeypatch.setattr(ThisMachine, "gpus", gpus)
        monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
        monkeypatch.setattr(Sweep, "run", _refuse_to_measure)
        for asked in (most + 1, 999_999):
            ran = command("tune", folder, "--engine", "onnxruntime", "--instances", f"1,{asked}", *_QUICK)
            assert (ran.status, ran.out) == (1, "")
            error = f"--instances: {asked} instances asked for, at most {most} can be measured here"
            assert ran.err.splitlines()[-1].endswith(error)
        ran = command("tune", folder, "--engine", "onnxruntime", "--instances", str(most), *_QUICK)
        assert ran.err.splitlines()[-1].endswith("it is measured")

    def test_models_whose_choice_has_no_place(self, command: Command, folder: Path) -> None:
        ran = command("tune", folder / "1" / "model.onnx", "--write")
        assert "--write: a bare file has no config.pbtxt; give a model's folder" in ran.err
        config = folder / "config.pbtxt"
        config.write_text(config.read_text() + 'parameters { key: "batch" value { string_value: "4" } }\n')
        ran = command("tune", folder, "--write")
        assert "--write: the parameter 'batch' names the one batch size" in ran.err

    def test_requests_of_drawn_lengths_are_also_tried_padded(self, command: Command, tmp_path: Path) -> None:
        folder = drop(tmp_path / "models", "encoder", encoder().SerializeToString(), "max_batch_size: 8\n")
        of_one = ("--engine", "onnxruntime", "--batch-sizes", "8", "--instances", "1")
        words = (*of_one, "--lengths", "uniform:min=1,max=40")
        ran = command("tune", folder, *words, "--json", *_QUICK)
        assert ran.status == 0
        result = json.loads(ran.out)
        assert result["lengths"] == {"sequence": {"requests": 128, "median": 20.5, "largest": 40}}
        assert result["sizes_not_tried"] == ""
        alone, padded = result["measurements"]
        assert (alone["sizes"], alone["padded"]) == ("", None)
        assert (padded["sizes"], padded["rows"] > 2 * alone["rows"]) == ("sequence=16,24,32,40", True)
        assert 0 < padded["padded"] < 1
        assert result["recommended"] in (alone, padded)
        # Whatever was faster, a model that pads already is not tried without.
        config = folder / "config.pbtxt"
        config.write_text(with_choice(config.read_text(), ServingChoice(1, 8, sizes="sequence=16,40"), config.name))
        ran = command("tune", folder, *words, "--write", *_QUICK)
        assert ran.status == 0
        assert ran.row("1  ")[:1] == ["8"] and "without and with the parameter" not in ran.out
        assert "dimension 'sequence': 128 lengths, median 20.5, largest 40\n" in ran.out
        parameters = parse_model_config(config.read_text(), config.name).parameters
        assert parameters["sizes"].string_value == "sequence=16,40"

    def test_sizes_that_change_answers_are_not_proposed(self, command: Command, tmp_path: Path) -> None:
        floats = TensorProto.FLOAT
        mean = graph(
            [helper.make_node("ReduceMean", ["X"], ["MEAN"], axes=[1], keepdims=1)],
            {"X": (floats, ["batch", "length"])},
            {"MEAN": (floats, ["batch", 1])},
        )
        folder = drop(tmp_path / "models", "mean", mean, "max_batch_size: 4\n")
        words = ("--engine", "onnxruntime", "--batch-sizes", "2", "--instances", "1", "--lengths", "30", "--write")
        ran = command("tune", folder, *words, *_QUICK)
        assert ran.status == 0
        expected = "the parameter sizes was not tried, because a server would say: parameter 'sizes' pads requests, but"
        assert f"{expected} dimension 'length' must not be padded: output 'MEAN' changes by" in ran.out
        assert "sizes" not in (folder / "config.pbtxt").read_text()

    def test_a_folder_without_a_configuration_gets_one(self, command: Command, folder: Path) -> None:
        (folder / "config.pbtxt").unlink()
        ran = command(
            "tune", folder, "--engine", "onnxruntime", "--batch-sizes", "2", "--instances", "1", *_QUICK, "--write"
        )
        assert ran.status == 0
        assert (folder / "config.pbtxt").read_text() == (
            'backend: "onnx"\ninstance_group [ { count: 1 } ]\n'
            "max_batch_size: 2\ndynamic_batching { preferred_batch_size: [ 2 ] }\n"
        )
