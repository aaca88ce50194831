"""Verdicts are found again by everything that they depend on, and only where nobody else can write them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocserve.load_check import verdict_cache
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key


@dataclass(frozen=True)
class Found:
    text: str
    size: float


FOUND = Found("output 'y' differs", float("inf"))
KEY = verdict_key("rows", "digest", "onnxruntime 1.32.0")


def test_a_verdict_is_found_by_its_key_alone(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path)
    assert cache.find(KEY, Found) is None
    cache.remember(KEY, FOUND)
    assert VerdictCache(tmp_path).find(KEY, Found) == FOUND
    assert cache.find(verdict_key("rows", "digest", "onnxruntime 1.33.0"), Found) is None
    assert cache.find(verdict_key("reference", "digest", "onnxruntime 1.32.0"), Found) is None


def test_parts_do_not_run_together() -> None:
    assert verdict_key("rows", "ab", "c") != verdict_key("rows", "a", "bc")


def test_what_another_version_wrote_is_no_verdict(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path)
    cache.remember(KEY, {"other": 1})
    assert cache.find(KEY, Found) is None


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path)
    cache.remember(KEY, FOUND)
    (tmp_path / "verdicts").chmod(0o777)
    assert cache.find(KEY, Found) is None


def test_verdicts_are_lost_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = VerdictCache(tmp_path / "file")
    cache.remember(KEY, FOUND)
    assert cache.find(KEY, Found) is None


def test_old_verdicts_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_cache, "_MOST_VERDICTS", 2)
    cache, keys = VerdictCache(tmp_path), [verdict_key("rows", str(number)) for number in range(4)]
    for number, key in enumerate(keys):
        cache.remember(key, FOUND)
        os.utime(tmp_path / "verdicts" / key, (number, number))
    assert [key for key in keys if cache.find(key, Found)] == keys[2:]
