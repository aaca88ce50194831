"""Edition of the serving table: a number in memory that front ends read, another with each table.

Whoever finds the number unchanged knows that what the server has told of its models still holds: the number is written
before anybody is told that a model has been loaded.
"""

from __future__ import annotations

import mmap
import os

from rocserve.plane import anonymous_file


class Edition:
    """The server's side."""

    def __init__(self) -> None:
        self._file = anonymous_file.create("rocserve:edition", mmap.PAGESIZE)
        self._word = anonymous_file.map_to_write(self._file).cast("Q")
        self.descriptor = anonymous_file.open_for_reading(self._file)
        """To read."""

    def count(self) -> None:
        """The table has been replaced."""
        self._word[0] += 1

    def close(self) -> None:
        os.close(self._file)
        os.close(self.descriptor)


class EditionReader:
    """A front end's side."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over."""
        self._word = anonymous_file.map_to_read(descriptor).cast("Q")
        os.close(descriptor)

    @property
    def value(self) -> int:
        return self._word[0]
