from __future__ import annotations

from pathlib import Path

import numpy
import onnxruntime
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.models import add_sub, identity


def test_the_onnx_forms_compute_what_their_names_say(tmp_path: Path) -> None:
    for model in (add_sub("add_sub", dynamic_batching=False), identity("identity")):
        model.write_for_rocserve(tmp_path)
    left, right = numpy.arange(96, dtype=numpy.int32).reshape(2, 3, 16)
    session = onnxruntime.InferenceSession(tmp_path / "add_sub" / "1" / "model.onnx")
    total, difference = session.run(["OUTPUT0", "OUTPUT1"], {"INPUT0": left, "INPUT1": right})
    numpy.testing.assert_array_equal(total, left + right)
    numpy.testing.assert_array_equal(difference, left - right)
    session = onnxruntime.InferenceSession(tmp_path / "identity" / "1" / "model.onnx")
    numbers = numpy.random.default_rng(0).random(1 << 20, dtype=numpy.float32)
    numpy.testing.assert_array_equal(session.run(None, {"INPUT0": numbers})[0], numbers)


def test_both_forms_have_one_configuration_but_for_the_backend(tmp_path: Path) -> None:
    for batching in (False, True):
        model = add_sub(f"batching_{batching}", dynamic_batching=batching)
        model.write_for_rocserve(tmp_path / "rocserve")
        model.write_for_triton(tmp_path / "triton")
        ours, peers = (
            text_format.Parse(
                (tmp_path / server / model.name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
            )
            for server in ("rocserve", "triton")
        )
        assert (ours.backend, peers.backend) == ("onnxruntime", "python")
        assert ours.HasField("dynamic_batching") is batching
        ours.ClearField("backend")
        peers.ClearField("backend")
        assert ours == peers
        compile((tmp_path / "triton" / model.name / "1" / "model.py").read_text(), "model.py", "exec")
