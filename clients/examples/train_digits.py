"""Trains and writes the sample repository's digit classifier, and writes the images that it has never seen.

    python clients/examples/train_digits.py

The data are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. Each is drawn as a JPEG of some size, dark on
light with a margin, and goes through the pipeline that the server will run (model_repository/digits_preprocess), so
that the classifier learns from the inputs that it will get. A fifth of the digits of each class, chosen at random, is
held out: these are the JPEGs in tests/data/digits, named <index in the data set>_<label>.jpg.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import CpuEngine, EngineSetup
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, parse_pipeline
from rocserve.core.datatypes import DataType

ROOT = Path(__file__).resolve().parents[2]
SEED = 1797
LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

HELD_OUT_SHARE = 0.2
VARIANTS = 8
"""Slightly moved, turned and scaled drawings of each training digit, in addition to the straight one."""
SIZES = ((64, 64), (72, 72), (80, 60), (96, 96), (120, 90), (160, 120))
"""Width and height of the JPEGs, in pixels."""
MARGIN = 0.1
"""Of each side; the pipeline's crop cuts it off."""
JPEG_QUALITY = 90
HIDDEN_UNITS = (192, 96)

OPSET, IR_VERSION = 17, 9
"""Old enough for common versions of ONNX Runtime and MIGraphX."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Pose:
    """The position of a digit in its frame."""

    turn_degrees: float = 0.0
    scale: float = 1.0
    shift_x: float = 0.0
    """In parts of the digit's width and height."""
    shift_y: float = 0.0


def draw(digit: Array, size: tuple[int, int], pose: Pose = Pose()) -> bytes:
    """Return a JPEG of a digit (8 x 8, 0 = paper, 16 = ink)."""
    width, height = size
    inner_width, inner_height = round(width * (1 - 2 * MARGIN)), round(height * (1 - 2 * MARGIN))
    ink = Image.fromarray((digit * (230 / 16)).astype(np.uint8))
    ink = ink.resize((inner_width, inner_height), Image.Resampling.BICUBIC)
    frame = Image.new("L", size, 0)
    frame.paste(ink, ((width - inner_width) // 2, (height - inner_height) // 2))
    moved = frame.transform(size, Image.Transform.AFFINE, _inverse_affine(size, pose), Image.Resampling.BILINEAR)
    encoded = io.BytesIO()
    Image.eval(moved, lambda level: 245 - level).convert("RGB").save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()


def _inverse_affine(size: tuple[int, int], pose: Pose) -> tuple[float, float, float, float, float, float]:
    """Return Pillow's coefficients, which lead from a place in the result to the place in the source."""
    width, height = size
    angle = np.deg2rad(pose.turn_degrees)
    cosine, sine = np.cos(angle) / pose.scale, np.sin(angle) / pose.scale
    center_x, center_y = width / 2 + pose.shift_x * width, height / 2 + pose.shift_y * height
    return (
        cosine,
        sine,
        width / 2 - cosine * center_x - sine * center_y,
        -sine,
        cosine,
        height / 2 + sine * center_x - cosine * center_y,
    )


def random_pose(random: np.random.Generator) -> Pose:
    return Pose(
        turn_degrees=random.uniform(-12, 12),
        scale=random.uniform(0.9, 1.08),
        shift_x=random.uniform(-0.05, 0.05),
        shift_y=random.uniform(-0.05, 0.05),
    )


def sample_pipeline(pipeline_file: Path) -> CpuEngine:
    """Return the sample repository's pipeline, as in its config.pbtxt: grey, FP32, channels first."""
    color_format = ColorFormat.U8
    pipeline = parse_pipeline(pipeline_file.read_bytes(), color_format.channels)
    formats = (OutputFormat(DataType.FP32, Layout.NCHW),)
    return CpuEngine(EngineSetup("digits", pipeline, color_format, formats, batch_size=1, threads=1, device=None))


def preprocess(engine: CpuEngine, jpegs: Sequence[bytes]) -> Array:
    """Return FP32, images x 1 x 16 x 16."""
    return np.stack([engine.run_image(jpeg)[0] for jpeg in jpegs])


def training_images(digits: Array, labels: Array, random: np.random.Generator) -> tuple[list[bytes], Array]:
    jpegs: list[bytes] = []
    for digit in digits:
        for variant in range(1 + VARIANTS):
            size = SIZES[random.integers(len(SIZES))]
            jpegs.append(draw(digit, size, random_pose(random) if variant else Pose()))
    return jpegs, np.repeat(labels, 1 + VARIANTS)


def train(images: Array, labels: Array) -> MLPClassifier:
    classifier = MLPClassifier(HIDDEN_UNITS, alpha=1e-3, batch_size=128, max_iter=40, random_state=SEED)
    return classifier.fit(images.reshape(len(images), -1), labels)


def to_onnx(classifier: MLPClassifier, accuracy: float) -> onnx.ModelProto:
    """Return an ONNX model: IMAGE FP32 [n, 1, 16, 16] -> PROBABILITIES FP32 [n, 10] and LABEL BYTES [n, 1]."""
    nodes = [helper.make_node("Flatten", ["IMAGE"], ["hidden_0"], axis=1)]
    constants = [numpy_helper.from_array(np.array(LABELS, dtype=object), "labels")]
    last = len(classifier.coefs_) - 1
    for layer, (weights, biases) in enumerate(zip(classifier.coefs_, classifier.intercepts_, strict=True)):
        constants.append(numpy_helper.from_array(weights.astype(np.float32), f"weights_{layer}"))
        constants.append(numpy_helper.from_array(biases.astype(np.float32), f"biases_{layer}"))
        result = "logits" if layer == last else f"linear_{layer}"
        nodes.append(helper.make_node("Gemm", [f"hidden_{layer}", f"weights_{layer}", f"biases_{layer}"], [result]))
        if layer != last:
            nodes.append(helper.make_node("Relu", [result], [f"hidden_{layer + 1}"]))
    nodes += [
        helper.make_node("Softmax", ["logits"], ["PROBABILITIES"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=1),
        helper.make_node("Gather", ["labels", "best"], ["LABEL"], axis=0),
    ]
    graph = helper.make_graph(
        nodes,
        "digits_classifier",
        [helper.make_tensor_value_info("IMAGE", TensorProto.FLOAT, ("batch", 1, 16, 16))],
        [
            helper.make_tensor_value_info("PROBABILITIES", TensorProto.FLOAT, ("batch", len(LABELS))),
            helper.make_tensor_value_info("LABEL", TensorProto.STRING, ("batch", 1)),
        ],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(model, {"held-out accuracy": f"{accuracy:.4f}"})
    onnx.checker.check_model(model, full_check=True)
    return model


def label_accuracy(model: onnx.ModelProto, images: Array, labels: Array) -> float:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (predicted,) = session.run(["LABEL"], {"IMAGE": images})
    return float(np.mean(predicted[:, 0] == np.array(LABELS)[labels]))


def write_images(folder: Path, jpegs: Sequence[bytes], labels: Array, indexes: Array) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.jpg"):
        stale.unlink()
    for jpeg, label, index in zip(jpegs, labels, indexes, strict=True):
        (folder / f"{index:04}_{LABELS[label]}.jpg").write_bytes(jpeg)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the sample repository's digit classifier.")
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--images", type=Path, default=ROOT / "tests" / "data" / "digits")
    options = parser.parse_args()

    digits, labels = load_digits(return_X_y=True)
    digits = digits.reshape(-1, 8, 8)
    trained, held_out = train_test_split(
        np.arange(len(labels)), test_size=HELD_OUT_SHARE, stratify=labels, random_state=SEED
    )
    held_out.sort()
    random = np.random.default_rng(SEED)
    engine = sample_pipeline(options.model_repository / "digits_preprocess" / "1" / "pipeline.json")

    jpegs, jpeg_labels = training_images(digits[trained], labels[trained], random)
    classifier = train(preprocess(engine, jpegs), jpeg_labels)

    held_out_jpegs = [draw(digits[index], SIZES[random.integers(len(SIZES))]) for index in held_out]
    held_out_images = preprocess(engine, held_out_jpegs)
    accuracy = label_accuracy(to_onnx(classifier, 0.0), held_out_images, labels[held_out])

    model_file = options.model_repository / "digits_classifier" / "1" / "model.onnx"
    model_file.write_bytes(to_onnx(classifier, accuracy).SerializeToString())
    write_images(options.images, held_out_jpegs, labels[held_out], held_out)
    print(f"trained on {len(jpegs)} drawings of {len(trained)} digits, {classifier.n_iter_} passes")
    print(f"held-out accuracy: {accuracy:.2%} of {len(held_out)} digits")
    print(f"{model_file}: {model_file.stat().st_size:,} bytes; {options.images}: {len(held_out)} JPEGs")


if __name__ == "__main__":
    main()
