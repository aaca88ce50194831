"""Decides when front end processes serve clients in place of the server's own process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pace:
    """When front ends come and go. A share is of one CPU's time."""

    busy_share: float = 0.6
    """The server's process is busy if its data plane works for more than this share while there are several requests at
    once. Two clients that ask without a pause reach 0.8, and no number of clients more than 0.95. A client that asks
    one by one reaches 0.3 to 0.8, but answers take 1.4 times as long with a process in between."""
    busy_seconds: float = 2.0
    """Front ends come if the process has been busy for so long: they take half a second to start, so a burst would end
    before they helped."""
    quiet_share: float = 0.3
    """It is quiet if the data planes of all processes together work for less than this share, or if there is one
    request at a time: half of `busy_share`, because a load at the limit must not move its clients to and fro."""
    quiet_seconds: float = 600.0
    """Front ends go if it has been quiet for so long. They cost memory only."""
    sample_seconds: float = 0.5
    """Interval of the looks at the planes' work."""
    renewal_seconds: float = 20.0
    """Age at which gRPC connections are renewed, because gRPC moves clients in no other way without losing calls. A
    renewal costs a client less than 2 ms."""


PACE = Pace()


@dataclass(eq=False)
class Demand:
    """Decides whether front ends are wanted, by samples of the data planes' work and of the requests in flight."""

    pace: Pace
    has_front_ends: bool = field(default=False, init=False)
    """Whether they are wanted."""
    _last: tuple[float, float] | None = field(default=None, init=False)
    """Time and work of the last sample."""
    _since: float | None = field(default=None, init=False)
    """The time since which every sample has asked for a change."""

    def note(self, now: float, worked_seconds: float, in_flight: int) -> bool:
        """Take a sample: the time, the seconds that the planes of all processes have worked until then, and the number
        of requests in flight. Returns whether `has_front_ends` has changed."""
        last, self._last = self._last, (now, worked_seconds)
        if last is None or now <= last[0]:
            return False
        share, pace, are_several = (worked_seconds - last[1]) / (now - last[0]), self.pace, in_flight > 1
        if self.has_front_ends:
            asks_for_change = share < pace.quiet_share or not are_several
        else:
            asks_for_change = share > pace.busy_share and are_several
        if not asks_for_change:
            self._since = None
            return False
        if self._since is None:
            self._since = last[0]
        if now - self._since < (pace.quiet_seconds if self.has_front_ends else pace.busy_seconds):
            return False
        self.forget(not self.has_front_ends)
        return True

    def forget(self, has_front_ends: bool) -> None:
        """Begin anew, with front ends or without."""
        self.has_front_ends = has_front_ends
        self._last = self._since = None
