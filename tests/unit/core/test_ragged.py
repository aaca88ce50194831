"""Batches of different shapes, for cases that tests/e2e/test_ragged_batches.py has no model for."""

from __future__ import annotations

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.ragged import RaggedBatching


def test_parts_of_an_output_without_dims_of_its_own_are_one_value_a_row() -> None:
    config = ModelConfig(
        "m",
        max_batch_size=8,
        inputs=(InputConfig("X", DataType.FP32, (-1,), allow_ragged_batch=True),),
        outputs=(OutputConfig("Y", DataType.FP32, (1,), reshape=()),),
        scattered_outputs={"Y": "X"},
    )
    _, cuts = RaggedBatching(config).parts({"X": [(1, 3), (2, 5)]})
    assert cuts == {"Y": [(1,), (2,)]}
