"""The members on which an ensemble's requests run: those that were served when the request began."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from rocserve.core.serving import ServedVersion

StepVersions = Mapping[object, Sequence[ServedVersion]]
"""An ensemble, and each ensemble among its members -> the versions that its steps run."""

MemberReferences = tuple[weakref.ref[ServedVersion], ...]


class EnsembleMembers:
    """The members that belong together: all steps of a request, also those of ensembles within the ensemble, run on
    them. They are in use while new requests run on them, or a request still does. Calls are made on the data plane's
    thread."""

    def __init__(self, steps: StepVersions, versions: Iterable[ServedVersion]) -> None:
        """`versions`: all members at any depth. If one of them is cold, the members are not kept together: each step
        finds its member by name, because what is loaded may have to make room for it."""
        self.versions: Sequence[ServedVersion] = tuple(versions)
        self.cold = tuple([version for version in self.versions if version.is_cold])
        """Members that the next request has to load."""
        self.steps: StepVersions = {} if self.cold else steps
        """Empty = each step finds its member by name."""
        self.is_offered = True
        """Whether new requests run on them."""
        self._running = 0
        self._waiting: list[Callable[[], None]] = []
        self._below: dict[object, tuple[MemberReferences, bool]] = {}

    @property
    def is_in_use(self) -> bool:
        return self.is_offered or self._running > 0

    def below(self, ensemble: object) -> tuple[MemberReferences, bool]:
        """Return what the answers of the ensemble, or of one within it, depend on: its members at any depth, and
        whether one of them sees ids and parameters."""
        known = self._below.get(ensemble)
        if known is None:
            found: dict[ServedVersion, None] = {}
            waiting = [ensemble]
            while waiting:
                new = [member for member in self.steps.get(waiting.pop(), ()) if member not in found]
                found.update(dict.fromkeys(new))
                waiting += new
            members = tuple(found) or self.versions
            sees_requests = any(one.sees_requests for one in members if not one.config.is_ensemble)
            known = self._below[ensemble] = tuple(map(weakref.ref, members)), sees_requests
        return known

    def begin(self) -> None:
        """Note that a request runs on them."""
        self._running += 1

    def end(self) -> None:
        """Note that a request has ended."""
        self._running -= 1
        if not self.is_in_use:
            self._change()

    def leave(self) -> None:
        """Note that new requests run on them no longer."""
        self.is_offered = False
        self._change()

    def wait(self, call: Callable[[], None]) -> None:
        """Call back once, when they are offered or in use no longer."""
        self._waiting.append(call)

    def _change(self) -> None:
        if not self.is_in_use:
            # The ensemble may keep this object, but not the versions and their memory.
            self.steps, self.versions, self.cold, self._below = {}, (), (), {}
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
