"""Addresses of the callers' arrays, as C++ keeps them."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np


class Address:
    """The address of an array's bytes; does not keep the array alive."""

    def __init__(self, array: np.ndarray) -> None:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._pointer = array.ctypes.data
        self._available = owner.ctypes.data + owner.nbytes - self._pointer
        # Memory that numpy does not own cannot be watched.
        self._owner = weakref.ref(owner) if owner.base is None else None

    def read(self, count: int) -> np.ndarray:
        """A copy of `count` bytes. Raises AssertionError if the array is shorter, or is gone."""
        assert self._owner is None or self._owner() is not None, "a fed buffer was freed before it was read"
        assert count <= self._available, f"{count} bytes are read from a buffer of {self._available}"
        return np.frombuffer(ctypes.string_at(self._pointer, count), dtype=np.uint8)
