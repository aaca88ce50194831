"""Notifications of changed files: their end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from watchdog.observers.inotify import InotifyObserver

from rocserve.repository.watch import RepositoryWatch


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
    await watch.close()
    assert "the notifications of changed files did not end as they should: KeyError" in caplog.text
    await watch.renew()


async def test_it_tells_the_folders_that_have_changed(tmp_path: Path):
    for name in ("a", "b", ".hidden"):
        (tmp_path / name).mkdir()
    watch = RepositoryWatch([tmp_path], logging.getLogger("rocserve.test.watch"))
    await watch.renew()
    assert await watch.wait(5)
    assert watch.take() is None, "what was before the watch stood"
    (tmp_path / "a" / "file").write_text("x")
    assert await watch.wait(5)
    assert watch.take() == {tmp_path / "a"}
    while await watch.wait(0.2):
        watch.take()
    (tmp_path / ".hidden" / "file").write_text("x")
    assert await watch.wait(5)
    assert watch.take() is None, "folders may lead through it"
    await watch.close()
