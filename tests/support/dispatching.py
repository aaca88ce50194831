"""A dispatcher for tests without a data plane."""

from __future__ import annotations

from collections import deque

from rocserve.core.dispatch import Dispatcher
from rocserve.core.serving import ServingTableHolder

take_all = deque[None](maxlen=0).extend
"""Runs all steps immediately."""


def dispatcher_of(tables: ServingTableHolder) -> Dispatcher:
    return Dispatcher(tables, take_all)
