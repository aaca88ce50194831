"""Decides when front end processes serve clients in place of the server's own process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pace:
    """When front ends start and end. A share is a share of one CPU's time."""

    busy_share: float = 0.6
    """The server's process is busy if its data plane works for more than this share while several requests are in
    flight. Two clients without pauses reach 0.8; no number of clients exceeds 0.95. A client with one request at a time
    reaches 0.3 to 0.8, but its answers take 1.4 times as long with a process in between."""
    busy_seconds: float = 2.0
    """Front ends start if the process has been busy for this time. They take half a second to start, so a short burst
    ends before they help. Each second that is not busy takes back a quarter of one: bursts of a second every four
    seconds, in which clients would wait three times as long each time, bring front ends too."""
    quiet_share: float = 0.3
    """It is quiet if the data planes of all processes together work for less than this share, or if there is one
    request at a time. Half of `busy_share`, so that a load at the limit does not move clients back and forth."""
    quiet_seconds: float = 600.0
    """Front ends end if it has been quiet for this time. They cost only memory."""
    sample_seconds: float = 0.5
    """Interval of the samples."""
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
    _asked_seconds: float = field(default=0.0, init=False)
    """For how long samples have asked for a change."""

    def note(self, now: float, worked_seconds: float, in_flight: int) -> bool:
        """Take a sample: the time, the seconds that the planes of all processes have worked so far, and the number of
        requests in flight. Returns whether `has_front_ends` has changed."""
        last, self._last = self._last, (now, worked_seconds)
        if last is None or now <= last[0]:
            return False
        seconds = now - last[0]
        share, pace, are_several = (worked_seconds - last[1]) / seconds, self.pace, in_flight > 1
        if self.has_front_ends:
            asks_for_change = share < pace.quiet_share or not are_several
        else:
            asks_for_change = share > pace.busy_share and are_several
        if not asks_for_change:
            self._asked_seconds = 0.0 if self.has_front_ends else max(0.0, self._asked_seconds - seconds / 4)
            return False
        self._asked_seconds += seconds
        if self._asked_seconds < (pace.quiet_seconds if self.has_front_ends else pace.busy_seconds):
            return False
        self.forget(not self.has_front_ends)
        return True

    def forget(self, has_front_ends: bool) -> None:
        """Forget all samples, and begin with front ends or without."""
        self.has_front_ends = has_front_ends
        self._last, self._asked_seconds = None, 0.0
