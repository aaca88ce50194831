"""--backend-config: the settings that it changes, and the warnings about others."""

from __future__ import annotations

import pytest

from rocserve.backends.registry import BackendRegistry, discover_backends, with_backend_config


def sizes(registry: BackendRegistry) -> dict[str, int]:
    return {spec.name: spec.default_max_batch_size for spec in registry.backends}


def test_the_default_batch_size_of_one_backend_and_of_all() -> None:
    plain = sizes(discover_backends())
    registry, warnings = with_backend_config(discover_backends(), [("onnxruntime", "default-max-batch-size", "8")])
    assert (sizes(registry), warnings) == ({**plain, "onnx": 8}, ())
    both = [("", "default-max-batch-size", "16"), ("onnxruntime", "default-max-batch-size", "8")]
    registry, _ = with_backend_config(discover_backends(), both)
    assert sizes(registry) == {**dict.fromkeys(plain, 16), "onnx": 8}


@pytest.mark.parametrize(
    ("value", "warning"),
    [
        (
            ("python", "shm-default-byte-size", "1048576"),
            "--backend-config=python,shm-default-byte-size=1048576 has no effect: rocserve has no counterpart",
        ),
        (
            ("onnxruntime", "colour", "red"),
            "--backend-config=onnxruntime,colour=red has no effect: rocserve does not know the setting",
        ),
        (("", "colour", "red"), "--backend-config=colour=red has no effect: rocserve does not know the setting"),
        (
            ("tensorrt", "plugins", "a.so"),
            "--backend-config=tensorrt,plugins=a.so has no effect: there is no backend 'tensorrt'; there are: "
            + ", ".join(sorted(sizes(discover_backends()))),
        ),
    ],
)
def test_what_has_no_effect_is_said(value: tuple[str, str, str], warning: str) -> None:
    registry, warnings = with_backend_config(discover_backends(), [value])
    assert warnings == (warning,)
    assert sizes(registry) == sizes(discover_backends())
