"""Where rocserve means to take a configuration otherwise than Triton does, or to say more of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.parity.bad_configurations import READ, VERSIONS, bad_configurations
from support.parity.differences import Difference
from support.parity.exchange import Outcome


@dataclass(frozen=True, slots=True)
class SaysMore(Difference):
    """The same status, and Triton's text is within rocserve's; so too in the rows of the index."""

    def explains(self, triton: Outcome | None, rocserve: Outcome) -> bool:
        """See Difference."""
        if triton is None or triton.status != rocserve.status or not _is_within(triton.text, rocserve.text):
            return False
        if not isinstance(triton.answer, list):
            return triton.answer == rocserve.answer
        rows = zip(triton.answer, rocserve.answer, strict=False)
        return len(triton.answer) == len(rocserve.answer) and all(_is_row_within(*row) for row in rows)


def _is_within(triton: str, rocserve: str) -> bool:
    return triton.rstrip(";\n ") in rocserve


def _is_row_within(triton: dict[str, Any], rocserve: dict[str, Any]) -> bool:
    rest = [{key: value for key, value in row.items() if key != "reason"} for row in (triton, rocserve)]
    return rest[0] == rest[1] and _is_within(triton.get("reason", ""), rocserve.get("reason", ""))


_READ = "^INTERNAL: failed to load '.*', failed to poll from model repository$"
_REFUSED = r"^INVALID_ARGUMENT: load failed for model|^OK:  \[\{.*'state': 'UNAVAILABLE'"
_SERVED = r"^OK:  (\{\}|\[\{.*'state': 'READY'\}\])$"
_NAMED = r"^OK:  \[\{'name': '\w+'\}\]$"

CONFIGURATION_DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "The index says why a configuration cannot be read, or which member an ensemble lacks; Triton's log alone does",
        [entry.name for entry in bad_configurations() if entry.group == READ],
        _NAMED,
        r"^OK:  \[\{'name': '\w+',( 'version': '1',)? 'state': 'UNAVAILABLE', 'reason': .+\}\]$",
    ),
    Difference(
        "A model that has no version to serve stays in the index, with what it lacks",
        [entry.name for entry in bad_configurations() if entry.group == VERSIONS],
        r"^OK:  \[\]$",
        r"^OK:  \[\{'name': '\w+', .*'reason': \"at least one version must be available under the version policy",
    ),
    SaysMore(
        "A text goes on after Triton's words, with what to do or with the sample's name",
        [
            f"bad_{name}"
            for name in (
                "unknown_backend",
                "foreign_backend",
                "foreign_platform",
                "gpu_without_gpus",
                "warmup_variable",
                "warmup_no_data",
                "warmup_other_type",
                "warmup_other_shape",
                "warmup_missing_input",
                "members_missing",
            )
        ],
        "",
        "",
    ),
    Difference(
        "A tensor's name stands once; of two inputs of one name Triton serves the last",
        ["bad_input_twice", "bad_output_twice"],
        _SERVED,
        _REFUSED + "|is specified 2 times",
    ),
    Difference(
        "A Python model that names no tensor, which looks like a configuration that was cut, is refused",
        ["bad_no_tensors"],
        _SERVED,
        _REFUSED + "|must specify at least one 'input' or 'output' for bad_no_tensors",
    ),
    Difference(
        "A GPU may be named where none can be listed, as in some containers",
        ["bad_gpu_not_there"],
        "specifies invalid or unsupported gpu id 97",
        _SERVED,
    ),
    Difference(
        "What is said of a GPU's number does not speak of CUDA",
        ["bad_gpu_negative"],
        "specifies invalid or unsupported gpu id -1. GPUs with at least the minimum required CUDA compute",
        "specifies invalid or unsupported gpu id -1; expected the numbers of GPUs, from 0",
    ),
    Difference(
        "TensorRT's profiles are passed over with a warning",
        ["bad_profile"],
        "specifies profile field which is only supported for TensorRT models",
        _SERVED,
    ),
    Difference(
        "A circle of ensembles is told by its members",
        ["bad_member_itself"],
        "bad_member_itself -> ... -> bad_member_itself -> bad_member_itself$",
        "bad_member_itself -> bad_member_itself$",
    ),
    Difference(
        "A sample with an input that the model has not is refused",
        ["bad_warmup_unknown_input"],
        _SERVED,
        "unexpected inference input 'X' for model 'bad_warmup_unknown_input'; its inputs are: IN",
    ),
    Difference(
        "A sample that is too large is told of once; Triton says it for each row, or crashes",
        ["bad_warmup_batch_too_big"],
        None,
        "failed to run warmup sample 'sample': batch size 9 for 'bad_warmup_batch_too_big', max allowed is 8",
    ),
    Difference(
        "What is wrong with a sample's file is said with its name as it is",
        ["bad_warmup_size"],
        "warmup setting expects 16 bytes, but the data provided from shortonly has 4 bytes",
        r"warmup setting expects 16 bytes, but the data provided from short only has 4 bytes \(input 'IN'\)",
    ),
    Difference(
        "Ensembles have samples too, which are checked and run as those of models",
        ["bad_warmup_of_ensemble"],
        _READ,
        "expected 2 inputs but got 0 inputs for model 'bad_warmup_of_ensemble'",
    ),
    Difference(
        "A model file that is not there fails the load at once; Triton does not answer any more",
        ["bad_no_model_file", "bad_other_model_file"],
        None,
        "unable to find the model file of 'bad_(no|other)_model_file' in version folder 1: expected (model|other).py",
    ),
    Difference(
        "What is wrong with a Python model is the model's fault, and said by the file's path or in words",
        ["bad_script", "bad_script_class"],
        r"Internal: (SyntaxError: invalid syntax \(model.py|AttributeError: module '1.model' has no attribute)",
        r"Invalid argument: (SyntaxError: invalid syntax \(1/model.py|.* defines no class TritonPythonModel)",
    ),
    Difference(
        "Clients are shown no folder of the server's machine",
        ["bad_label_file_missing", "bad_warmup_no_file"],
        "failed to open text file for read /.*: No such file or directory",
        "for read bad_(label_file_missing/labels.txt|warmup_no_file/warmup/none): No such file or directory",
    ),
    Difference(
        "A Python model's parameters, which may name code, are the repository's",
        ["good_override_maps"],
        "^OK",
        r"^PERMISSION_DENIED: .* a load request may not set 'parameters\['k'\]'|^NOT_FOUND: Request for unknown model",
    ),
    Difference(
        "model_metrics are in newer Tritons than the one that is compared with",
        ["good_metrics"],
        f"{_READ}|^NOT_FOUND: Request for unknown model: 'good_metrics' is not found$",
        "^OK",
    ),
)
