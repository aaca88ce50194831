"""Verdicts are found again by everything that they depend on, and only where nobody else can write them."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.cache.digests import file_digest
from rocserve.load_check import verdict_cache
from rocserve.load_check.verdict_cache import Verdict, VerdictCache, verdict_key


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


def found_or_checked(cache: VerdictCache, is_lasting: bool = True, checks: list[str] | None = None) -> Found:
    """`checks`: gets an element with each check."""

    def check() -> Found:
        if checks is not None:
            checks.append("")
        return FOUND

    verdict, seconds = cache.find_or_check(KEY, Found, check, lambda verdict: is_lasting, wait_seconds=PATIENCE_SECONDS)
    assert seconds >= 0
    return verdict


def test_a_verdict_is_checked_once(tmp_path: Path) -> None:
    checks: list[str] = []
    for _ in range(2):
        assert found_or_checked(VerdictCache(tmp_path), checks=checks) == FOUND
    assert len(checks) == 1


def test_what_another_check_may_decide_is_not_kept(tmp_path: Path) -> None:
    checks: list[str] = []
    for _ in range(2):
        assert found_or_checked(VerdictCache(tmp_path), is_lasting=False, checks=checks) == FOUND
    assert len(checks) == 2


def test_one_of_several_workers_checks(tmp_path: Path) -> None:
    checks: list[str] = []
    with ThreadPoolExecutor(4) as workers:
        found = [workers.submit(found_or_checked, VerdictCache(tmp_path), True, checks) for _ in range(4)]
    assert len(checks) == 1
    assert [one.result() for one in found] == [FOUND] * 4


def test_those_who_wait_take_what_another_check_may_decide(tmp_path: Path) -> None:
    waits = Event()

    class Waiting(VerdictCache):
        def find(self, key: str, kind: type[Verdict]) -> Verdict | None:
            waits.set()
            return super().find(key, kind)

    with ThreadPoolExecutor(1) as other:
        found: list[Future[Found]] = []
        checks: list[str] = []

        def check() -> Found:
            found.append(other.submit(found_or_checked, Waiting(tmp_path), True, checks))
            assert waits.wait(PATIENCE_SECONDS)
            return FOUND

        VerdictCache(tmp_path).find_or_check(KEY, Found, check, lambda verdict: False, wait_seconds=PATIENCE_SECONDS)
        assert found[0].result() == FOUND and not checks
    assert found_or_checked(VerdictCache(tmp_path), is_lasting=False, checks=checks) == FOUND
    assert len(checks) == 1


def test_a_worker_whose_check_fails_leaves_it_to_the_next(tmp_path: Path) -> None:
    def fail() -> Found:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        VerdictCache(tmp_path).find_or_check(KEY, Found, fail, lambda verdict: True, wait_seconds=PATIENCE_SECONDS)
    assert found_or_checked(VerdictCache(tmp_path)) == FOUND


def test_a_check_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert found_or_checked(VerdictCache(tmp_path / "file")) == FOUND


def test_the_digest_of_a_large_file_is_kept_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return file_digest(path)

    monkeypatch.setattr(verdict_cache, "file_digest", digest)
    monkeypatch.setattr(verdict_cache, "_WORTH_BYTES", 4)
    cache, large, small = VerdictCache(tmp_path / "cache"), tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"weights")
    small.write_bytes(b"net")
    monkeypatch.setattr(verdict_cache, "_UNCHANGED_SECONDS", -1)
    right = file_digest(small, [large])
    assert [cache.digest(small, [large]) for _ in range(2)] == [right] * 2
    assert read == [small, large, small]
    large.write_bytes(b"WEIGHTS of another size")
    assert cache.digest(large) == file_digest(large)
    # A file that was written just now may change once more within the same tick of the clock.
    monkeypatch.setattr(verdict_cache, "_UNCHANGED_SECONDS", 1e9)
    large.write_bytes(b"and once more")
    read.clear()
    assert [cache.digest(large) for _ in range(2)] == [file_digest(large)] * 2
    assert read == [large] * 2
