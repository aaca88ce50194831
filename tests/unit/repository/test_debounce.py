"""The end of notifications about changed files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_SECONDS
from watchdog.observers.inotify import InotifyObserver

from rocserve.repository.debounce import Debounce
from rocserve.repository.watch import RepositoryWatch

SETTLE = 1.0


def test_a_change_counts_at_the_second_scan_after_the_settle_time() -> None:
    debounce = Debounce(SETTLE)
    assert debounce.observe(0.0, 0.1, {"m": "a"}) == set()
    assert debounce.due() == 1.1
    assert debounce.observe(1.0, 1.05, {"m": "a"}) == set(), "the scans are 0.9 s apart"
    assert debounce.observe(1.1, 1.2, {"m": "a"}) == {"m"}
    assert debounce.due() is None
    assert debounce.observe(5.0, 5.1, {"m": "a"}) == set(), "it counts once"


def test_reopened_counts_again_though_it_is_the_same() -> None:
    debounce = Debounce(SETTLE)
    debounce.accept("m", "a")
    debounce.reopen("m")
    debounce.observe(0.0, 0.0, {"m": "a"})
    assert debounce.observe(1.0, 1.0, {"m": "a"}) == {"m"}
    debounce.reopen("m")
    debounce.observe(2.0, 2.0, {})
    assert debounce.observe(3.0, 3.0, {}) == {"m"}, "gone while it was open"


SCANS = st.lists(
    st.tuples(
        st.floats(0.01, 1.5), st.floats(0.0, 0.3), st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 2))
    ),
    max_size=30,
)


@given(SCANS)
def test_what_counts_was_the_same_for_the_settle_time_and_ends_as_it_is(scans: list[tuple[float, float, dict]]) -> None:
    debounce = Debounce(SETTLE)
    now = 0.0
    history: list[tuple[float, float, dict]] = []
    acted: dict[str, int] = {}
    for gap, duration, seen in scans:
        began, now = now + gap, now + gap + duration
        history.append((began, now, seen))
        for name in debounce.observe(began, now, seen):
            assert acted.get(name) != seen.get(name), "nothing changed"
            steady = [
                (start, end)
                for index, (start, end, _) in enumerate(history)
                if all(later.get(name) == seen.get(name) for _, _, later in history[index:])
            ]
            assert began - steady[0][1] >= SETTLE
            acted = {**acted, name: seen[name]} if name in seen else {k: v for k, v in acted.items() if k != name}
        assert all(due > 0 for due in [debounce.due() or 1.0])
    if not scans:
        return
    last = scans[-1][2]
    debounce.observe(now + 5, now + 5, last)
    for name in debounce.observe(now + 10, now + 10, last):
        assert acted.get(name) != last.get(name)
        acted = {**acted, name: last[name]} if name in last else {k: v for k, v in acted.items() if k != name}
    assert acted == last or debounce.unsettled == frozenset()
    assert debounce.due() is None


async def test_what_the_library_stumbles_over_keeps_nobody_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    watch = RepositoryWatch([tmp_path], logging.getLogger("rocserve.test.watch"))
    await watch.renew()
    stop = InotifyObserver.stop

    def stumble(observer: InotifyObserver) -> None:
        stop(observer)
        raise KeyError(b"/models/m")

    monkeypatch.setattr(InotifyObserver, "stop", stumble)
    # The logger's own level: a server that ran in this process may have set that of `rocserve`.
    caplog.set_level(logging.DEBUG, logger="rocserve.test.watch")
    await watch.close()
    assert "the notifications of changed files did not stop properly: KeyError" in caplog.text
    assert max(record.levelno for record in caplog.records) < logging.WARNING, "nobody can act on it"
    await watch.renew()


async def test_it_tells_the_folders_that_have_changed(tmp_path: Path):
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).mkdir()
    watch = RepositoryWatch([tmp_path], logging.getLogger("rocserve.test.watch"))
    await watch.renew()
    assert await watch.wait(PATIENCE_SECONDS)
    assert watch.take_changed() is None, "what was before the watch stood"
    (tmp_path / "a" / "file").write_text("x")
    assert await watch.wait(PATIENCE_SECONDS)
    changed = watch.take_changed()
    assert changed == {tmp_path / "a"}
    (tmp_path / ".hidden" / "file").write_text("x")
    # Further notifications of the first file may come before.
    while changed is not None:
        assert changed <= {tmp_path / "a"}
        assert await watch.wait(PATIENCE_SECONDS), "any folder may have changed: folders may lead through a hidden one"
        changed = watch.take_changed()
    await watch.close()
