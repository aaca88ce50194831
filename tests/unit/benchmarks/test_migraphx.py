"""The group migraphx: the served models, and the bare engine that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.migraphx import BarePrograms, migraphx_cases
from benchmarks.migraphx_models import INPUT, OUTPUT, networks
from benchmarks.probe import Outputs
from rocserve.backends.migraphx.installation import find_installation
from rocserve.settings import EngineSettings

pytestmark = pytest.mark.long

CASES = {(case.model, case.streams): case for case in migraphx_cases()}


def test_the_networks_are_what_their_configurations_say(tmp_path: Path) -> None:
    for network in networks():
        network.write(tmp_path)
        for batching in (False, True):
            folder = tmp_path / network.served_name(batching)
            config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
            assert config.HasField("dynamic_batching") is batching
            assert config.parameters["engine"].string_value == "migraphx"
            assert (tuple(config.input[0].dims), tuple(config.output[0].dims)) == (network.row, network.answer)
            session = onnxruntime.InferenceSession(folder / "1" / "model.onnx")
            (output,) = session.run([OUTPUT], {INPUT: numpy.repeat(network.request(), 3, axis=0)})
            assert output.shape == (3, *network.answer)


def test_there_is_a_case_for_each_way_to_ask() -> None:
    assert {(name, streams) for name, streams in CASES if name.startswith("mlp")} == {
        (name, streams) for name in ("mlp", "mlp_batched") for streams in (1, 8, 32)
    }


@pytest.fixture
def bare(migraphx_root: Path, tmp_path: Path) -> Iterator[BarePrograms]:
    for network in networks():
        network.write(tmp_path)
    installation = find_installation(EngineSettings(migraphx_root=str(migraphx_root)))
    with BarePrograms(installation, tmp_path, tmp_path) as programs:
        yield programs


def test_the_bare_engine_computes_what_the_server_must(bare: BarePrograms) -> None:
    for model, streams in (("mlp", 8), ("mlp_batched", 8), ("mini_resnet", 1), ("identity_batched", 8)):
        case = CASES[model, streams]
        bare.prepare(case)
        assert bare.measure(case, 0.05).rate > 0
    assert bare.cpu_seconds() > 0


def test_other_numbers_of_the_bare_engine_are_seen(bare: BarePrograms) -> None:
    def check(outputs: Outputs) -> None:
        numpy.testing.assert_array_equal(outputs[OUTPUT], 2.0)

    with pytest.raises(AssertionError, match="not equal"):
        bare.prepare(replace(CASES["mlp", 1], check=check))
