"""Runs `rocserve quantise`: quantises a PyTorch program and compares the result with the original."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from rocserve.backends.migraphx.compiling.calibration import PIPELINE_HINT, read_samples
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.printable import readable_size as size
from rocserve.core.requests import TensorSpec
from rocserve.flags import FlagError
from rocserve.load_check.tensors import Array
from rocserve.settings.flag import FILE, POSITIVE, Kind, flag, one_of, positional
from rocserve.verbs.printing import console_on, replacing, say
from rocserve.verbs.verb import Verb

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from rocserve.backends.pytorch.program import Program, ProgramSignature, ProgramTensor

Run = Callable[[Mapping[str, Array]], Sequence[Array]]

_ONNX = ".onnx"
_ROWS_PER_RUN = 32
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class QuantiseOptions:
    model: Path = positional(Path(), Kind("MODEL.pt2", Path), "a program that torch.export.save has written")
    method: str = flag(
        "", one_of(("dynamic", "static", "qat")), "the method of quantisation, as described above", required=True
    )
    data: Path = flag(
        Path(),
        Kind("FILES", Path),
        "samples of the inputs: an .npz file, an .npy file, or a folder of .npy files or images",
        required=True,
    )
    out: Path = flag(Path(), FILE, "the file to write, .pt2 or .onnx", required=True)
    samples: int = flag(128, POSITIVE, "how many samples of the data are used at most")
    pipeline: Path | None = flag(None, Kind("FILE.json", Path), "the rocAL pipeline that makes inputs of the images")
    train: Path | None = flag(
        None, Kind("FILE.py", Path), "for qat: a file whose function train(network) trains the network"
    )


def run(options: QuantiseOptions) -> None:
    """Write the quantised program and print its difference from the original. Raises ServeError: UNAVAILABLE if PyTorch
    or torchao is not installed, INVALID_ARGUMENT if the model cannot be quantised."""
    if (options.train is None) == (options.method == "qat"):
        raise FlagError("--method qat needs --train, and no other method takes it")
    if options.out.suffix not in (".pt2", _ONNX):
        raise FlagError(f"argument --out: expected a file that ends in .pt2 or .onnx, got '{options.out}'")
    if options.out.resolve() == options.model.resolve():
        raise FlagError(f"argument --out: '{options.out}' is the model itself, with which the result is compared")
    if not options.out.absolute().parent.is_dir():
        raise invalid_argument(f"{options.out} cannot be written: there is no folder {options.out.parent}")
    out = console_on()
    for_onnx = ("onnxscript>=0.7", "onnxruntime>=1.18") if options.out.suffix == _ONNX else ()
    for needed in ("torch==2.13.0", "torchao==0.18.0", *for_onnx):
        package = re.split("[=>]", needed)[0]
        if find_spec(package) is None:
            raise unavailable(f"this needs {package}, which is not installed: pip install '{needed}'")
    import torch  # Importing torch sets its log level, so the level is changed afterwards.

    # Hide deprecations, and warnings about kernels for other machines.
    warnings.simplefilter("ignore")
    for package in (torch.__name__, "torchao"):
        logging.getLogger(package).setLevel(logging.ERROR)
    from rocserve.backends.pytorch.program import open_exported
    from rocserve_tools.quantise import methods

    exported = _read(options.model)
    original = open_exported(exported)
    runs = read_inputs(original.signature, options)
    count = len(methods.layers(exported.graph))
    if methods.is_quantised(exported):
        raise invalid_argument("it is quantised already: it has weights in int8; name the original program")
    if options.method == "dynamic":
        module = methods.quantise_dynamic(exported)
    elif options.method == "static":
        module = methods.quantise_static(exported, runs)
    else:
        assert options.train is not None, "the command line requires it"
        module = methods.quantise_trained(exported, methods.training_function(options.train), runs[0])
    quantised = methods.export_again(module, exported, runs[0])
    # `layers` does not find dynamically quantised layers. Other quantised layers dequantise their weights.
    weighted = methods.layers(quantised.graph)
    left = [node for node in weighted if "dequantize" not in str(getattr(node.args[1], "target", ""))]
    done = count - len(left)
    if not done:
        raise invalid_argument(
            f"method {options.method} finds no layer to quantise in the program; dynamic quantises linear layers,"
            " static and qat also convolutions"
        )
    _write(quantised, original.signature, options.out)
    say(out, f"{options.out}: {done} of {count} layers with weights in int8, by {options.method}")
    say(out, f"size: {size(options.model.stat().st_size)} -> {size(options.out.stat().st_size)}")
    if options.method == "qat" and (changed := methods.batch_norms(exported.module(check_guards=False)).changed):
        say(out, f"batch normalisation: {changed} layers with another eps than PyTorch's default keep it")
    _compare(original, _written(options.out), runs, out)


def read_inputs(program: ProgramSignature, options: QuantiseOptions) -> list[Mapping[str, Array]]:
    """Return the inputs of each run, from any files that calibration data can be. Raises ServeError (INVALID_ARGUMENT)
    if the data cannot be read or do not fit, or if a size other than the batch varies."""
    for path in filter(None, (options.data, options.pipeline)):
        if not path.exists():
            raise invalid_argument(f"{path} does not exist")
    inputs = {tensor.names[0]: _calibration_input(tensor, program.batches) for tensor in program.inputs}
    calibration = CompileOptions(
        Target.REF, Precision.INT8, _within_root(options.data), _within_root(options.pipeline), options.samples
    )
    try:
        samples = read_samples(_ROOT, calibration, inputs, inputs)
    except ServeError as error:
        inner = f"calibration_data '{calibration.calibration_data}'"
        text = error.text.replace(inner, f"--data {options.data}").replace(PIPELINE_HINT, "name it by --pipeline")
        raise ServeError(error.code, text) from None
    starts = range(0, len(next(iter(samples.values()))), _ROWS_PER_RUN if program.batches else 1)
    return [
        {
            name: array[start : start + _ROWS_PER_RUN] if program.batches else array[start]
            for name, array in samples.items()
        }
        for start in starts
    ]


def _calibration_input(tensor: ProgramTensor, batches: bool) -> TensorSpec:
    name, shape = tensor.names[0], tensor.shape or ()
    sizes = shape[1:] if batches else shape
    if -1 in sizes:
        raise invalid_argument(
            f"input '{name}' of the program has the shape {list(shape)}: only a first dimension that all inputs and"
            " outputs share may vary; export it with fixed sizes"
        )
    assert tensor.datatype is not None, "only an output's may be open"
    if tensor.datatype is DataType.BF16:
        raise invalid_argument(
            f"input '{name}' of the program is in bf16, which samples in numpy's files cannot be; export it with inputs"
            " in fp32"
        )
    return TensorSpec(name, tensor.datatype, sizes)


def _within_root(path: Path | None) -> str:
    """Return the path relative to `/`, because calibration data are paths relative to a folder."""
    return "" if path is None else str(path.resolve().relative_to(_ROOT))


def _read(path: Path) -> ExportedProgram:
    from rocserve.backends.pytorch.exported_file import read_exported
    from rocserve.backends.pytorch.model_file import FileKind, file_kind

    kind = file_kind(path)
    if kind is not FileKind.EXPORTED:
        raise invalid_argument(f"{path.name} is {kind.value}; only programs of torch.export can be quantised")
    return read_exported(path)


def _write(program: ExportedProgram, signature: ProgramSignature, path: Path) -> None:
    import torch

    with replacing(path, 0o644) as file:
        if path.suffix == _ONNX:
            from rocserve.backends.pytorch.onnx_file import write_onnx

            write_onnx(program, Path(file.name), *signature.default_names)
        else:
            # PyTorch aborts the process if it cannot write its file completely, so it writes into memory.
            written = io.BytesIO()
            torch.export.save(program, written)
            file.write(written.getbuffer())


def _written(path: Path) -> Run:
    if path.suffix == _ONNX:
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda run: session.run(None, dict(run))
    from rocserve.backends.pytorch.program import open_exported
    from rocserve_tools.quantise.methods import results

    exported = _read(path)
    program = open_exported(exported)
    return lambda run: results(program, run)


def _compare(original: Program, written: Run, runs: Sequence[Mapping[str, Array]], out: Console) -> None:
    from rocserve_tools.quantise.methods import results

    exact_runs = [results(original, run) for run in runs]
    other_runs = [written(run) for run in runs]
    for place, tensor in enumerate(original.signature.outputs or ()):
        # float64, so that unsigned and small datatypes can be subtracted.
        exact, other = (
            np.concatenate([np.atleast_1d(run[place]) for run in one]).astype(np.float64)
            for one in (exact_runs, other_runs)
        )
        largest, most = np.abs(exact - other).max(initial=0), np.abs(exact).max(initial=0)
        line = f"{tensor.names[0]}: largest difference {largest:.4g}, of values up to {most:.4g}"
        if exact.ndim > 1 and exact.size:
            agreement = np.mean(exact.argmax(-1) == other.argmax(-1))
            line += f"; the largest element is at the same place in {agreement:.2%} of {exact[..., 0].size} rows"
        say(out, line)


VERB = Verb(
    "Quantise a program of torch.export with torchao, and compare it with the original on the data. dynamic: linear"
    " layers, each row of their inputs with its own scale; static: layers and operations between them, with scales from"
    " the data; qat: like static, after the network has been trained with quantised layers.",
    QuantiseOptions(),
    run,
    lambda options: options.model,
)
