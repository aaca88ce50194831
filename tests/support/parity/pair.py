"""Triton and rocserve at once, on the same folders, in explicit control mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from benchmarks.server_process import free_port, http_flags
from benchmarks.triton_peer import TritonPeer
from support.parity.contrast import contrast
from support.parity.counting import Comparisons
from support.parity.differences import Difference
from support.parity.exchange import Exchange, Outcome
from support.parity.side import Side
from support.server import RocserveProcess

TRITON_FLAGS = (
    "--model-control-mode=explicit",
    "--exit-on-error=false",
    # What its many models leave undone is ended with it.
    "--exit-timeout-secs=1",
    "--allow-metrics=false",
)
ROCSERVE_FLAGS = (
    "--model-control-mode=explicit",
    "--allow-client-shm=true",
    # What Triton allows to anybody.
    "--allow-remote-files=true",
    "--allow-remote-models=true",
)


Answers = tuple[Sequence[Outcome] | None, Sequence[Outcome]]
"""What Triton said, unless it was left out, and what rocserve said."""
_ASKED_AT_ONCE = 4


class Pair:
    """Two running servers. What is written into `scratch` both can load."""

    def __init__(
        self,
        triton: Side,
        rocserve: Side,
        scratch: Path,
        comparisons: Comparisons,
        differences: Sequence[Difference],
    ) -> None:
        self.triton = triton
        self.rocserve = rocserve
        self.scratch = scratch
        self._comparisons = comparisons
        self._differences = differences
        self._ahead: dict[str, Future[Answers]] = {}

    @contextmanager
    def asking_ahead(self, *groups: Sequence[Exchange]) -> Iterator[None]:
        """In the block, groups of exchanges that do not mind each other are taken beside each other, before `compare`
        wants them: Triton is slow to start a model's process. The exchanges of a group are taken in their order."""
        self._ahead = {exchange.name: Future() for group in groups for exchange in group}
        answers = [[(exchange, self._ahead[exchange.name]) for exchange in group] for group in groups]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            for group in answers:
                pool.submit(self._ask_in_order, group)
            try:
                yield
            finally:
                for _, answer in chain.from_iterable(answers):
                    answer.cancel()

    def _ask_in_order(self, group: Sequence[tuple[Exchange, Future[Answers]]]) -> None:
        for exchange, answer in group:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._ask(exchange))
                except BaseException as error:
                    answer.set_exception(error)

    def _known(self, exchange: Exchange) -> list[Difference]:
        return [entry for entry in self._differences if exchange.name in entry.exchanges]

    def _ask(self, exchange: Exchange) -> Answers:
        left_out = any(entry.triton is None for entry in self._known(exchange))
        if left_out:
            return None, exchange.ask(self.rocserve)
        if not exchange.at_once:
            return exchange.ask(self.triton), exchange.ask(self.rocserve)
        with ThreadPoolExecutor(1) as beside:
            expected = beside.submit(exchange.ask, self.triton)
            found = exchange.ask(self.rocserve)
            return expected.result(), found

    def compare(self, exchange: Exchange, configuration: str = "") -> None:
        """Take the exchange's steps with both servers; an AssertionError where outcomes differ without a reason.

        Args:
            configuration: names the model configuration that the exchange is about, to count it.
        """
        known = self._known(exchange)
        ahead = self._ahead.pop(exchange.name, None)
        expected, found = self._ask(exchange) if ahead is None else ahead.result()
        shown: list[Difference] = []
        for index, step in enumerate(exchange.steps):
            theirs = None if expected is None else expected[index]
            digest = step.digest()
            if digest:
                self._comparisons.requests.add(digest)
                if (found[index] if theirs is None else theirs).is_bad:
                    self._comparisons.bad_requests.add(digest)
            shown += _explained(exchange.name, index, theirs, found[index], known)
        for entry in known:
            assert entry in shown, f"this difference has gone: {entry}"
            self._comparisons.count_difference(entry)
        if configuration:
            self._comparisons.configurations.add(configuration)


def _explained(
    name: str, index: int, triton: Outcome | None, rocserve: Outcome, known: Sequence[Difference]
) -> list[Difference]:
    """The differences that explain the outcomes of a step; none where they are equal."""
    if triton == rocserve:
        return []
    fitting = [entry for entry in known if entry.explains(triton, rocserve)]
    # Where Triton is left out, the steps that lead to the one in question have nothing to be compared with.
    assert fitting or triton is None, f"{name}, step {index}:\n{contrast(triton, rocserve)}"
    return fitting


@contextmanager
def running_pair(
    peer: TritonPeer,
    repositories: Sequence[Path],
    folder: Path,
    comparisons: Comparisons,
    differences: Sequence[Difference],
    both: Sequence[str] = (),
) -> Iterator[Pair]:
    """Both servers, ready; gone after the block.

    Args:
        repositories: model repositories of both; the last one is `Pair.scratch`.
        folder: for the logs.
        both: further flags, which both understand.
    """
    triton_port, triton_http_port, rocserve_http_port = free_port(), free_port(), free_port()
    further = [f"--model-repository={repository}" for repository in repositories[1:]]
    triton = peer.server(
        "triton",
        repositories[0],
        triton_port,
        folder / "triton.log",
        (*further, *TRITON_FLAGS, *http_flags(triton_http_port), *both),
    )
    rocserve = RocserveProcess(
        repositories, *ROCSERVE_FLAGS, *http_flags(rocserve_http_port), *both, log=folder / "rocserve.log"
    )
    # Entering Triton waits until it is ready; rocserve starts meanwhile.
    with rocserve, triton:
        rocserve.wait_until_ready()
        with (
            Side("triton", triton.address, triton_http_port) as triton_side,
            Side("rocserve", rocserve.address, rocserve_http_port) as rocserve_side,
        ):
            yield Pair(triton_side, rocserve_side, repositories[-1], comparisons, differences)
