"""`rocserve serve WHAT`, typed by a user who has a model and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop, graph
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.grpc import InferRequestedOutput
from tritonclient.utils import InferenceServerException


def asked(server: RocserveProcess, model: str, values: list[list[float]]) -> list[list[float]]:
    return server.client().infer(model, [infer_input("X", np.array(values, np.float32))]).as_numpy("Y").tolist()


def replace(file: Path, model: bytes) -> None:
    """Replace the file atomically."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(model)
    part.replace(file)


def with_external_data(file: Path, value: float) -> None:
    model = onnx.load_from_string(add_constant(value))
    constant = model.graph.node[0].attribute[0].t
    constant.raw_data = np.float32(value).tobytes()
    constant.ClearField("float_data")
    constant.name = "value"
    model.graph.initializer.append(constant)
    del model.graph.node[0]
    onnx.save_model(
        model, file, save_as_external_data=True, location=f"{file.name}.data", size_threshold=0, convert_attribute=True
    )


def test_a_file_is_served_and_replaced_under_load(tmp_path: Path) -> None:
    file = tmp_path / "adder.onnx"
    file.write_bytes(add_constant(1.0))
    (tmp_path / "other.onnx").write_text("none of its business")
    (tmp_path / "other.pbtxt").write_text("nor this")
    with RocserveProcess([], str(file), "--log-verbose=1", log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        assert f"'{file}' is a model file; the model's name is 'adder'" in server.log_text
        assert asked(server, "adder", [[1, 2]] * 64) == [[2, 3]] * 64
        with pytest.raises(InferenceServerException, match="batch-size must be <= 64 for 'adder'"):
            asked(server, "adder", [[1, 2]] * 65)
        with ConstantLoad(server.address, "adder", {1.0, 2.0, 3.0}) as load:
            load.wait_until_answered_by(1.0)
            replace(file, add_constant(2.0))
            load.wait_until_answered_by(2.0, times=100)
            file.write_bytes(add_constant(3.0))
            load.wait_until_answered_by(3.0, times=100)
            replace(file, b"no model")
            wait_until(lambda: "failed to load 'adder' version 1: " in server.log_text, "the failed load")
            load.wait_until_answered_by(3.0, times=100)
        assert load.failures == []
        assert load.wrong == []


def test_a_folder_as_exports_leave_it_is_served_with_its_external_data(tmp_path: Path) -> None:
    folder = tmp_path / "mnt" / "models"
    folder.mkdir(parents=True)
    with_external_data(folder / "resnet.onnx", 1.0)
    (folder / "config.json").write_text("{}")
    (folder / "labels.txt").write_text("a\nb\n")
    environment = {"MODEL_NAME": "of-kserve"}
    with RocserveProcess([], str(folder), log=tmp_path / "server.log", environment=environment) as server:
        server.wait_until_ready()
        assert asked(server, "of-kserve", [[1, 2], [3, 4]]) == [[2, 3], [4, 5]]
        best = InferRequestedOutput("Y", class_count=1)
        answer = server.client().infer("of-kserve", [infer_input("X", np.float32([[1, 2]]))], outputs=[best])
        assert answer.as_numpy("Y").tolist() == [[b"3.000000:1:b"]], "labels.txt names the classes"
        with ConstantLoad(server.address, "of-kserve", {1.0, 2.0}) as load:
            load.wait_until_answered_by(1.0)
            new = tmp_path / "new"
            new.mkdir()
            with_external_data(new / "resnet.onnx", 2.0)
            for file in new.iterdir():
                shutil.copy(file, folder)
            load.wait_until_answered_by(2.0, times=100)
            (folder / "labels.txt").write_text("a\nb\nc\n")
            wait_until(
                lambda: "models/labels.txt has 3 labels, but output 'Y' of model 'of-kserve' has 2" in server.log_text
            )
            load.wait_until_answered_by(2.0, times=100)
        assert load.failures == []


def test_a_model_folder_goes_by_the_name_that_is_given_and_may_batch_a_batch_1_export(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    spec = (onnx.TensorProto.FLOAT, [1, 2])
    model = graph([onnx.helper.make_node("Neg", ["X"], ["Y"])], {"X": spec}, {"Y": spec})
    (folder / "1" / "model.onnx").write_bytes(model)
    (folder / "config.pbtxt").write_text('name: "other"' + ADD_CONSTANT_CONFIG)
    flags = (str(folder), "--model-name=mine", "--log-verbose=1")
    with RocserveProcess([], *flags, log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        assert f"'{folder}' is a model folder; the model's name is 'mine'" in server.log_text
        text = "has batch size 1 in its file: the rows of a batch run one by one"
        wait_until(lambda: text in server.log_text, "the worker's line in the log")
        assert asked(server, "mine", [[1, 2], [3, 4], [5, 6]]) == [[-1, -2], [-3, -4], [-5, -6]]


def test_a_model_is_sent_no_more_rows_than_its_worker_has_memory_for(tmp_path: Path) -> None:
    row_bytes = 32 << 20
    wide = onnx.numpy_helper.from_array(np.array([1, row_bytes // 8], np.int64), "wide")
    nodes = [
        onnx.helper.make_node("Constant", [], ["wide"], value=wide),
        onnx.helper.make_node("Tile", ["X", "wide"], ["many"]),
        onnx.helper.make_node("ReduceMax", ["many"], ["most"], axes=[1], keepdims=1),
        onnx.helper.make_node("Sub", ["X", "most"], ["Y"]),
    ]
    spec = (onnx.TensorProto.FLOAT, ["batch", 2])
    (tmp_path / "wide.onnx").write_bytes(graph(nodes, {"X": spec}, {"Y": spec}))
    flags = (str(tmp_path / "wide.onnx"), "--log-verbose=1", f"--worker-memory-bytes={32 * row_bytes}")
    with RocserveProcess([], *flags, log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        most = server.client().get_model_config("wide").config.max_batch_size
        # How many depends on the machine's free memory too.
        assert most < 32
        text = f"memory suffices for batches of {most} rows"
        wait_until(lambda: text in server.log_text, "the worker's line in the log")
        assert asked(server, "wide", [[1, 2]] * most) == [[-1, 0]] * most
        assert "memory limit" not in server.log_text


def test_a_python_model_is_served_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    @staticmethod\n"
        "    def auto_complete_config(config):\n"
        "        config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [-1, 2]})\n"
        "        config.add_output({'name': 'Y', 'data_type': 'TYPE_FP32', 'dims': [-1, 2]})\n"
        "        return config\n"
        "    def execute(self, requests):\n"
        "        values = [pb_utils.get_input_tensor_by_name(request, 'X').as_numpy() for request in requests]\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', 2 * value)]) for value in values]\n"
    )
    with RocserveProcess([], str(tmp_path / "twice.py"), log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        assert asked(server, "twice", [[1, 2]]) == [[2, 4]]


PHOTO = Path("tests/data/digits/0002_two.jpg").resolve()


def test_what_is_printed_can_be_pasted(tmp_path: Path) -> None:
    given = {
        "IMAGE": (onnx.TensorProto.FLOAT, [3, 32, 32]),
        "TEXTS": (onnx.TensorProto.STRING, [1]),
        "FLAGS": (onnx.TensorProto.BOOL, [2, 2]),
    }
    nodes = [onnx.helper.make_node("Identity", [name], [f"SAME_{name}"]) for name in given]
    file = tmp_path / "it's 100% big.onnx"
    file.write_bytes(graph(nodes, given, {f"SAME_{name}": spec for name, spec in given.items()}))
    with RocserveProcess([], str(file), log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        by_shell, by_python = pasted(server)
        printed = run("bash", "-c", by_shell)
        for values in ('"data":[0.0,0.0,', '"data":["text"]', '"data":[false,false,false,false]'):
            assert values in printed
        assert "[[[0. 0. 0." in run(sys.executable, "-c", by_python)


def test_a_pipeline_is_served_by_its_file_and_asked_with_a_photo(tmp_path: Path) -> None:
    pipeline = Path("model_repository/digits_preprocess/1/pipeline.json").resolve()
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(pipeline, folder / "decode.json")
    shutil.copy(PHOTO, folder / "photo.jpg")
    with RocserveProcess([], str(folder / "decode.json"), log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        by_shell, by_python = pasted(server)
        assert by_shell.endswith("-F encoded=@photo.jpg")
        assert '"shape":[1,16,16,3]' in run("bash", "-c", by_shell, folder=folder)
        assert "[[[[" in run(sys.executable, "-c", by_python, folder=folder)


def test_a_repository_is_known_as_one_and_a_table_tells_what_is_served_and_why_not(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    drop(repository, "good", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repository, "bad", b"no model")
    flags, environment = (str(repository), "--log-verbose=1"), {"MODEL_NAME": "not-for-repositories"}
    with RocserveProcess([], *flags, log=tmp_path / "server.log", environment=environment) as server:
        wait_until(lambda: "\nbad 1: " in server.printed, "the table, and the reason under it")
        assert f"'{repository}' is a model repository" in server.log_text
        assert server.client().is_model_ready("good")
        lines = [line.split() for line in server.printed.splitlines()]
        assert ["model", "version", "runs", "on", "inputs", "outputs", "state"] in lines
        assert ["good", "1", "onnxruntime,", "cpu", "X", "FP32", "[-1,2]", "Y", "FP32", "[-1,2]", "READY"] in lines
        assert ["bad", "1", "UNAVAILABLE"] in lines
        assert "curl" not in server.printed


def pasted(server: RocserveProcess) -> tuple[str, str]:
    """The shell line and the Python lines that the server has printed."""
    wait_until(lambda: "print(result" in (text := server.printed) and text.endswith("\n\n"), "what can be pasted")
    _, _, shell, _, python, _ = server.printed.split("\n\n")[-6:]
    return shell, python


def run(*command: str, folder: Path | None = None) -> str:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    ).stdout


def test_what_cannot_be_served_is_said_and_ends_with_status_2(tmp_path: Path) -> None:
    """tests/unit/command/test_flags.py has the others."""
    command = [sys.executable, "-m", "rocserve.cli", "serve", "none.onnx"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (2, "rocserve serve: there is no file or folder 'none.onnx'\n")
