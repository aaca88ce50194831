"""One browser for all tests of the page, and one server for those of its models, requests and versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import begin_anew, opened_page, running_browser
from support.page_models import drop_page_models
from support.server import RocserveProcess


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def opened(browser: Any) -> Iterator[tuple[Any, list[str]]]:
    """One page for all tests: a new one is a process of the browser, which costs as much as most tests."""
    with opened_page(browser) as opened:
        yield opened


@pytest.fixture
def page(opened: tuple[Any, list[str]]) -> Iterator[Any]:
    """A page; fails at the end of a test if its content security policy or a script had a fault."""
    page, faults = opened
    begin_anew(page)
    faults.clear()
    yield page
    assert not faults


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's repository. A test that changes it uses its own names."""
    repository = tmp_path_factory.mktemp("page") / "repository"
    drop_page_models(repository, gate=repository.parent / "go on")
    return repository


@pytest.fixture(scope="package")
def server(models: Path) -> Iterator[RocserveProcess]:
    with RocserveProcess([models], log=models.parent / "server.log") as running:
        running.wait_until_ready()
        yield running
