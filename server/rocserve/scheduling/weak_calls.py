"""Calls back without keeping alive whoever is called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

_Arguments = ParamSpec("_Arguments")


def weakly(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """The bound method as one that does nothing once its object is gone.

    For what an object hands to its own parts, and to timers: a ring of references would keep it, and the workers'
    channels with it, until the garbage collector comes by; a timer that nobody needs any more until it fires.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments, **named)

    return call
