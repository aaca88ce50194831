"""One browser for all tests of the page, and one server for those of its models, requests and versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import faultless_page, running_browser
from support.page_models import drop_page_models
from support.server import RocserveProcess


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with faultless_page(browser) as page:
        yield page


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
