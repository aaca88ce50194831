"""Every number of a configuration at 0, -1, the ends of its type and beyond: served, or refused in words."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from support.configuration_numbers import TEMPLATES, configurations, is_of_type, numbers_of
from support.machine import ToldMachine

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import complete_definition, read_model_definitions
from rocserve.core.errors import ServeError
from rocserve.core.requests import Signature
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.engine_plan import plan_engine
from rocserve.repository.version_loader import new_scheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.scheduler import SchedulerParts

LOG = logging.getLogger("test")
FIELDS: dict[str, FieldDescriptor] = dict(numbers_of(ModelConfig.DESCRIPTOR))
REGISTRY = discover_backends()
MACHINE = ToldMachine(instances=16)
TRIED_SECONDS = 5.0
"""For one configuration, on a machine that does much else."""

LOW32, HIGH32, LOW64, HIGH64 = str(-(2**31)), str(2**31 - 1), str(-(2**63)), str(2**63 - 1)
_DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"
_RANGE = "sequence batching minimum slot utilization must be in range"
_RESHAPE = {"0": _DIMENSION, "-1": "has different size", LOW64: _DIMENSION, HIGH64: "has different size"}
_DIMS = {"0": _DIMENSION, LOW64: _DIMENSION, HIGH64: f"bytes, at most {HIGH64} are possible"}
_POSITIVE = {
    "0": "must be positive",
    "-1": "must be positive",
    LOW32: "must be positive",
    HIGH32: "must be <= max batch",
}
_NO_TYPE = {"0": "must specify 'data_type'"}
_NO_GPUS = "has kind KIND_CPU but specifies one or more GPUs"

REFUSED: dict[str, dict[str, str]] = {
    "max_batch_size": {"-1": "must be non-negative", LOW32: "must be non-negative"},
    "input.data_type": _NO_TYPE,
    "input.dims": _DIMS,
    "input.reshape.shape": _RESHAPE,
    "output.data_type": _NO_TYPE,
    "output.dims": _DIMS,
    "output.reshape.shape": _RESHAPE,
    "batch_input.data_type": dict.fromkeys(("0", "14"), "must be TYPE_INT32 or TYPE_FP32"),
    "dynamic_batching.preferred_batch_size": _POSITIVE,
    "dynamic_batching.default_priority_level": {"0": "must be in range [1, 18446744073709551615]"},
    "dynamic_batching.priority_queue_policy.key": {"0": "must have priority level in range"},
    "sequence_batching.direct.minimum_slot_utilization": dict.fromkeys(
        ("-1", "3.4028234e38", "-3.4028234e38", "1e400", "inf", "nan"), _RANGE
    ),
    "sequence_batching.oldest.max_candidate_sequences": dict.fromkeys(("-1", LOW32), "must not be negative"),
    "sequence_batching.oldest.preferred_batch_size": _POSITIVE,
    "sequence_batching.control_input.control.kind": {"3": "must not specify either"},
    "sequence_batching.control_input.control.data_type": dict.fromkeys(("0", "14"), "unexpected data type for control"),
    "sequence_batching.state.data_type": {"0": "must specify 'data_type'"},
    "sequence_batching.state.dims": {
        "0": _DIMENSION,
        LOW64: _DIMENSION,
        HIGH64: "bytes, at most 2147483647 are possible",
    },
    "sequence_batching.state.initial_state.data_type": dict.fromkeys(("0", "14"), "does not match the state data type"),
    "sequence_batching.state.initial_state.dims": {
        "-1": "contains variable dimensions",
        **dict.fromkeys(("0", LOW64, HIGH64), "doesn't match 'state' dim description"),
    },
    "instance_group.count": {
        HIGH32: "ask for 2147483647 instances on the CPU, at most 16 are possible here; lower 'count', or raise"
        " --max-model-instances"
    },
    "instance_group.gpus": dict.fromkeys(("0", "-1", LOW32, HIGH32), _NO_GPUS),
    "model_warmup.batch_size": {"4294967295": "has 4294967295 rows, at most 1000000 are possible"},
    "model_warmup.count": {"4294967295": "has 4294967295 runs, at most 10000 are possible"},
    "model_warmup.inputs.value.data_type": dict.fromkeys(("0", "14"), "data-type is"),
    "model_warmup.inputs.value.dims": {
        "0": "unexpected shape for input 'IN'",
        **dict.fromkeys(("-1", LOW64), "expects all variable-size dimensions are specified"),
        HIGH64: "bytes, at most 2147483647 are possible",
    },
    "model_metrics.metric_control.histogram_options.buckets": {"nan": "'buckets' that are numbers"},
}
"""By field and value, what the refusal says; values that the type does not know are refused by themselves."""


def test_every_number_of_a_configuration_is_listed() -> None:
    assert set(TEMPLATES) == set(FIELDS)
    assert set(REFUSED) <= set(FIELDS)


@pytest.mark.parametrize("path", FIELDS)
def test_a_number_is_served_or_refused_in_words(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    for value, text in configurations(path):
        (folder / "config.pbtxt").write_text(text)
        expected = REFUSED.get(path, {}).get(value, "")
        begun = time.monotonic()
        try:
            plan_whole(folder)
            refusal = ""
        except ServeError as error:
            refusal = error.text
        assert time.monotonic() - begun < TRIED_SECONDS
        if is_of_type(FIELDS[path], value):
            assert bool(refusal) == bool(expected), f"{path}: {value}: {refusal or 'served'}"
            assert expected in refusal
        else:
            assert refusal.startswith("config.pbtxt:"), f"{path}: {value}: {refusal or 'served'}"


def plan_whole(folder: Path) -> None:
    """All that the server does with a configuration but to start workers. Raises: ServeError: it is refused."""
    (definition,) = read_model_definitions(folder, REGISTRY)
    if definition.backend is None:
        complete_definition(definition, None)
        return
    complete = complete_definition(definition, Signature((), (), supports_batching=False))
    plan_engine(complete, folder, MACHINE)
    plane = PlaneLoop(LOG)
    try:
        parts = SchedulerParts(complete.config, 1, ModelStatistics(), plane, QueueLimits(), LOG)
        scheduler = new_scheduler(parts)
        scheduler.attach(object())
        scheduler.close(lambda: None)
    finally:
        plane.stop()
