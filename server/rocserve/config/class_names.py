"""Class names from a file that the configuration does not name: the file of `--labels`, or labels.txt in the model's
folder. They belong to the only output that has as many classes as the file has lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.config.model_folder import LABELS_FILENAME, ModelFolder, read_names
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig, OutputConfig, Purpose
from rocserve.core.printable import listed
from rocserve.core.validation import format_shape
from rocserve.presets import PREPROCESS
from rocserve.protocol import model_config_pb2 as messages


@dataclass(frozen=True, slots=True)
class ClassNames:
    """The names of a model's classes, with the file that has them."""

    source: str
    """The file as messages name it: clients see no folder of the server's machine."""
    filename: str
    """The file's name, for the configuration."""
    names: tuple[str, ...]
    is_asked_for: bool = False
    """The command line names the file, so a model that cannot use it is refused."""

    @property
    def count_text(self) -> str:
        return f"{len(self.names)} label{'' if len(self.names) == 1 else 's'}"

    def given_to(self, config: ModelConfig, message: messages.ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
        """Return the complete configuration with these labels at the output that they fit, and warnings. `message`: the
        same configuration, which gets the file's name. Raises ServeError (INVALID_ARGUMENT) if they must fit."""
        makes_others = PREPROCESS in config.parameters
        try:
            output = labelled_output(config, self)
        except ServeError:
            # The models of `preprocess` use the names, or refuse them.
            if not makes_others:
                raise
            return config, ()
        if output is None:
            return config, () if makes_others else (unused_text(config, self),)
        next(one for one in message.output if one.name == output.name).label_filename = self.filename
        labelled = replace(output, label_filename=self.filename, labels=self.names)
        return replace(config, outputs=tuple(labelled if one is output else one for one in config.outputs)), ()


def find_class_names(folder: ModelFolder, file: Path | None) -> ClassNames | None:
    """Read the class names in `file` (of `--labels`), else in labels.txt of the model's folder; None = no such file.
    Raises ServeError if the file is unusable."""
    if file is not None:
        names = read_names(ModelFolder(file.parent, file.resolve().parent), file.name)
        return ClassNames(f"--labels={file.name}", file.name, names, is_asked_for=True)
    if not folder.listing.has_file(LABELS_FILENAME):
        return None
    return ClassNames(f"{folder.path.name}/{LABELS_FILENAME}", LABELS_FILENAME, read_names(folder, LABELS_FILENAME))


def with_own_names(config: ModelConfig, purpose: Purpose) -> ModelConfig:
    """Return the configuration with the class names of the model's own file, if they fit a classifier's output."""
    names = purpose.class_names
    fitting = [one for one in config.outputs if _is_scores(one) and classes_of(config, one) == len(names)]
    if purpose.task not in ("", "classify") or len(fitting) != 1:
        return config
    labelled = replace(fitting[0], labels=names)
    return replace(config, outputs=tuple(labelled if one is fitting[0] else one for one in config.outputs))


def labelled_output(config: ModelConfig, found: ClassNames) -> OutputConfig | None:
    """Return the only output that has as many classes as there are names; None = there is none (see `unused_text`).
    Raises ServeError (INVALID_ARGUMENT) if there must be one: the command line names the file, or the model's only
    fractions are scores with a different number of classes."""
    # The classification extension refuses these datatypes.
    outputs = [one for one in config.outputs if one.datatype not in (DataType.BYTES, DataType.BF16)]
    fitting = [one for one in outputs if classes_of(config, one) == len(found.names)]
    if len(fitting) == 1:
        return fitting[0]
    scores = [one for one in outputs if one.datatype.numpy_dtype.kind == "f"]
    if not fitting and len(scores) == 1 and _is_scores(scores[0]):
        raise wrong_number(config, found, scores[0].name, classes_of(config, scores[0]))
    if found.is_asked_for:
        raise invalid_argument(unused_text(config, found))
    return None


def classes_of(config: ModelConfig, output: OutputConfig) -> int:
    """Return the number of classes that an output has values for: its last dimension, or its only one that is not 1
    ([1000, 1, 1]); -1 = open, 0 = a scalar."""
    sides = [side for side in dims_of_one_row(config, output.dims) if side != 1]
    return sides[0] if len(sides) == 1 else output.dims[-1] if output.dims else 0


def wrong_number(config: ModelConfig, found: ClassNames, output: str, classes: int) -> ServeError:
    """Return the error for names that do not fit. `output`: the output's name, or several."""
    remedy = "name the right file" if found.is_asked_for else "correct the file, or move it away"
    return invalid_argument(
        f"{found.source} has {found.count_text}, but output '{output}' of model '{config.name}' has {classes} classes;"
        f" expected a file with a line for each class: {remedy}"
    )


def unused_text(config: ModelConfig, found: ClassNames) -> str:
    """Return the text about names that fit no output, or several."""
    outputs = listed([f"{one.name} {one.datatype.value} {format_shape(one.dims)}" for one in config.outputs])
    fitting = [one.name for one in config.outputs if classes_of(config, one) == len(found.names)]
    many = "several outputs have" if len(fitting) > 1 else "no output has"
    return (
        f"{found.source} is not used: it has {found.count_text}, and {many} as many classes ({outputs}); name it as the"
        " label_filename of an output in config.pbtxt"
    )


def _is_scores(output: OutputConfig) -> bool:
    """Whether an output has the form of a classifier's: fractions, one for each of at least two classes. Without
    batching an open first dimension may be the number of boxes, [-1, 4]."""
    sides = [side for side in output.dims if side != 1]
    return len(sides) == 1 and sides[0] > 1 and output.datatype.numpy_dtype.kind == "f"


def dims_of_one_row(config: ModelConfig, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims for one row: a model that does not batch may have a leading dimension for the batch."""
    return dims[1:] if not config.max_batch_size and len(dims) > 1 and dims[0] in (1, -1) else dims
