"""Class names of --labels and of labels.txt beside a model: which output takes them, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.model_folders import Models

from rocserve.config.definition import ModelDefinition, complete_definition
from rocserve.core.errors import ServeError
from rocserve.core.model_config import Purpose
from rocserve.core.requests import Signature

MakeSignature = Callable[..., Signature]
Outputs = dict[str, tuple[str, tuple[int, ...]]]
THREE = "ant\nbee\ncat\n"
INPUTS = {"x": ("FP32", (-1, 4))}


def completed(
    models: Models, signature: Signature, more: str = "", file: Path | None = None, name: str = "m"
) -> ModelDefinition:
    files = {"config.pbtxt": f'backend: "onnxruntime" {more}', "1/model.onnx": "", "labels.txt": THREE}
    folder = models.folder(name, files)
    return complete_definition(models.read(folder, labels=file), signature)


def labels_of(definition: ModelDefinition) -> dict[str, tuple[str, ...]]:
    return {output.name: output.labels for output in definition.config.outputs if output.labels}


@pytest.mark.parametrize(
    "outputs",
    [
        {"p": ("FP32", (-1, 3))},
        {"p": ("FP16", (-1, 3, 1, 1))},
        {"p": ("INT64", (-1, 3))},
        {"label": ("INT64", (-1, 1)), "p": ("FP32", (-1, 3))},
        {"name": ("BYTES", (-1, 3)), "p": ("FP32", (-1, 3))},
        {"boxes": ("FP32", (-1, 9, 4)), "p": ("FP32", (-1, 9, 3))},
    ],
)
def test_the_only_output_with_as_many_classes_takes_them(
    models: Models, make_signature: MakeSignature, outputs: Outputs
) -> None:
    complete = completed(models, make_signature(INPUTS, outputs))
    assert labels_of(complete) == {"p": ("ant", "bee", "cat")}
    assert {one.name: one.label_filename for one in complete.message.output if one.label_filename} == {
        "p": "labels.txt"
    }
    assert not [warning for warning in complete.warnings if "label" in warning]
    assert complete_definition(complete, make_signature(INPUTS, outputs)).config == complete.config


def test_a_model_that_does_not_batch_takes_them(models: Models, make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (1, 4))}, {"p": ("FP32", (1, 3))})
    assert labels_of(completed(models, signature)) == {"p": ("ant", "bee", "cat")}


def test_scores_of_another_number_of_classes_refuse_the_file(
    models: Models, make_signature: MakeSignature, tmp_path: Path
) -> None:
    with pytest.raises(ServeError) as caught:
        completed(models, make_signature(INPUTS, {"p": ("FP32", (-1, 5))}))
    assert caught.value.text == (
        "m/labels.txt has 3 labels, but output 'p' of model 'm' has 5 classes; expected a file"
        " with a line for each class: correct the file, or move it away"
    )


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ({"p": ("FP32", (-1, 3)), "q": ("FP32", (-1, 3))}, "several outputs have as many classes (p FP32 [3], q"),
        ({"boxes": ("FP32", (-1, 7, 84))}, "no output has as many classes (boxes FP32 [7,84])"),
        ({"p": ("FP32", (-1, -1))}, "no output has as many classes (p FP32 [-1])"),
        ({"name": ("BYTES", (-1, 3))}, "no output has as many classes (name BYTES [3])"),
        ({"p": ("FP32", (-1, 1))}, "no output has as many classes (p FP32 [1])"),
        ({"p": ("FP32", (-1, 9)), "q": ("FP32", (-1, 1))}, "no output has as many classes (p FP32 [9], q FP32 [1])"),
    ],
)
def test_names_without_a_place_are_named_in_the_log_or_refused_if_asked_for(
    models: Models, make_signature: MakeSignature, tmp_path: Path, outputs: Outputs, why: str
) -> None:
    complete = completed(models, make_signature(INPUTS, outputs))
    assert labels_of(complete) == {}
    unused = [warning for warning in complete.warnings if "labels.txt is not used" in warning]
    assert len(unused) == 1
    assert f"it has 3 labels, and {why}" in unused[0]
    (tmp_path / "names").write_text(THREE)
    with pytest.raises(ServeError, match=r"^--labels=names is not used: it has 3 labels, and "):
        completed(models, make_signature(INPUTS, outputs), file=tmp_path / "names", name="n")


def test_boxes_of_a_model_that_does_not_batch_are_no_scores(models: Models, make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (4,))}, {"boxes": ("FP32", (-1, 4)), "kinds": ("INT32", (-1,))})
    complete = completed(models, signature)
    assert labels_of(complete) == {}
    assert "labels.txt is not used" in complete.warnings[-1]


def test_the_file_of_the_command_line_is_taken_wherever_it_lies(
    models: Models, make_signature: MakeSignature, tmp_path: Path
) -> None:
    file = tmp_path / "names"
    file.write_text(THREE)
    complete = completed(models, make_signature(INPUTS, {"p": ("FP32", (-1, 3))}), file=file)
    assert labels_of(complete) == {"p": ("ant", "bee", "cat")}
    file.write_text("one\n")
    with pytest.raises(ServeError, match=r"^--labels=names has 1 label, but output 'p' of model 'n' has 3 classes; "):
        completed(models, make_signature(INPUTS, {"p": ("FP32", (-1, 3))}), file=file, name="n")


def test_labels_of_the_configuration_win(models: Models, make_signature: MakeSignature, tmp_path: Path) -> None:
    more = 'output { name: "p" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" } max_batch_size: 1'
    (tmp_path / "names").write_text("x\ny\nz\n")
    folder = models.folder(
        "m", {"config.pbtxt": f'backend: "onnxruntime" {more}', "1/model.onnx": "", "labels.txt": THREE}
    )
    definition = models.read(folder, labels=tmp_path / "names")
    complete = complete_definition(definition, make_signature(INPUTS, {"p": ("FP32", (-1, 3))}))
    assert labels_of(complete) == {"p": ("ant", "bee", "cat")}
    assert "--labels=names is not used: the configuration names label_filename 'labels.txt'" in (complete.warnings)


def test_names_for_image_models_are_left_to_them(models: Models, make_signature: MakeSignature) -> None:
    more = 'parameters { key: "preprocess" value { string_value: "yolov8" } }'
    for name, dims in (("boxes", (-1, 7, 84)), ("scores", (-1, 5))):
        complete = completed(models, make_signature(INPUTS, {"p": ("FP32", dims)}), more, name=name)
        assert labels_of(complete) == {}
        assert not [warning for warning in complete.warnings if "label" in warning]
        assert complete.class_names is not None
        assert complete.class_names.names == ("ant", "bee", "cat")


@pytest.mark.parametrize(("task", "names"), [("classify", 3), ("", 3), ("detect", 0)])
def test_names_in_the_model_s_own_file_are_taken_last(
    models: Models, make_signature: MakeSignature, task: str, names: int
) -> None:
    signature = make_signature(INPUTS, {"p": ("FP32", (-1, 3))})
    signature = replace(signature, purpose=Purpose(task, ("x", "y", "z")))
    folder = models.folder("own", {"config.pbtxt": 'backend: "onnxruntime"', "1/model.onnx": ""})
    assert len(labels_of(complete_definition(models.read(folder), signature)).get("p", ())) == names
    assert labels_of(completed(models, signature)) == {"p": ("ant", "bee", "cat")}
