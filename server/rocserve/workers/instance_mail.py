"""Mail of instances: a source of the data plane's loop that polls those which have something to answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rocserve.plane.heap import Heap
from rocserve.plane.link import RingReader
from rocserve.plane.loop import PlaneLoop
from rocserve.plane.trimming import HeapTrimmer

if TYPE_CHECKING:
    from rocserve.workers.instance import Instance


_POLLS_BETWEEN_OTHERS = 32
"""Polling those that seldom speak then costs a turn little where there are hundreds, and none waits long
while the loop is awake."""


class InstanceMail:
    """Implements plane.loop.Source. A worker that posts while the loop sleeps rings by its socket."""

    wake_descriptor: int | None = None
    longest_sleep_seconds = math.inf
    looks = 1

    def __init__(self, plane: PlaneLoop, looks: int = 0) -> None:
        """`looks`: that a worker looks for a batch before it sleeps."""
        self.looks_of_workers = looks
        self.plane = plane
        self.expected: dict[Instance, RingReader] = {}
        """Those that have something to answer, and where they post it."""
        self._others: dict[Instance, RingReader] = {}
        """Of those that may speak unasked, and do so rarely."""
        self._polls = 0
        self._returning: dict[Instance, None] = {}
        self.trimmer = HeapTrimmer(plane)

    def listen(self, instance: Instance) -> None:
        """It may speak unasked; for that too it does not ring while the loop is awake."""
        self._others[instance] = instance.inbox

    def return_later(self, instance: Instance) -> None:
        """At the end of this round it is to have its slots back that have been read."""
        self._returning[instance] = None

    def forget(self, instance: Instance) -> None:
        self.expected.pop(instance, None)
        self._others.pop(instance, None)
        self._returning.pop(instance, None)

    def poll(self) -> bool:
        busy = False
        self._polls += 1
        if self._others and not self._polls % _POLLS_BETWEEN_OTHERS:
            self._check_others()
        answered: list[Instance] = []
        for instance, inbox in self.expected.items():
            if inbox.other_words[inbox.posted_at] != inbox.taken:
                answered.append(instance)
        for instance in answered:
            busy = True
            instance.take_mail()
            if not instance.is_expected:
                self.expected.pop(instance, None)
        if self._returning:
            returning, self._returning = self._returning, {}
            for instance in returning:
                instance.return_places()
        return busy

    def has_mail(self) -> bool:
        if self._others:
            self._check_others()
        # Written out: it runs before each sleep.
        for inbox in self.expected.values():  # noqa: SIM110
            if inbox.has_mail():
                return True
        return False

    def _check_others(self) -> None:
        for instance in [instance for instance, inbox in self._others.items() if inbox.has_mail()]:
            self.expected[instance] = instance.inbox

    def let_go(self, heap: Heap) -> None:
        """Close a heap once what has been asked of the data plane is done. From any thread."""
        self.plane.call_soon(lambda: self._close(heap))

    def _close(self, heap: Heap) -> None:
        self.trimmer.forget(heap)
        heap.close()
