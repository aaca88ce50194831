from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.web_stores import WebServer


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server
