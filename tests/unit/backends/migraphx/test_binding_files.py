"""What is read of files, and of the process, beside MIGraphX's calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.backends.migraphx.binding import interface
from rocserve.backends.migraphx.binding.interface import Binding, loaded_version


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("/opt/rocm-7.1.1/lib/migraphx/lib/libmigraphx.so.2014000.0.70101", "2.14.0"),
        ("/opt/a folder/libmigraphx.so.2009012", "2.9.12"),
        ("/opt/libmigraphx.so.3", ""),
    ],
)
def test_the_version_is_that_of_the_loaded_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, version: str
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 fd:00 12 /usr/lib/libmigraphx_c.so.3.0\n"
        f"7f02-7f03 r--p 00000000 fd:00 13                         {file}\n"
    )
    monkeypatch.setattr(interface, "_MAPS", maps)
    assert loaded_version() == version


def test_a_process_without_it() -> None:
    assert loaded_version() == ""


class SilentBinding(Binding):
    """A binding that only writes."""

    check_target = _parse_onnx = _parse_tensorflow = _load = None  # type: ignore[assignment]


def test_messages_are_taken_once_and_bounded() -> None:
    binding = SilentBinding()
    binding.add_message("one\n\n  \ntwo")
    assert binding.take_messages() == ["one", "two"]
    assert binding.take_messages() == []
    binding.add_message("\n".join(str(number) for number in range(5000)))
    taken = binding.take_messages()
    assert (len(taken), taken[-1]) == (1000, "4999")
