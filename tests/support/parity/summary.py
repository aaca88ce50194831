"""A pytest plugin: which Triton tests/parity compares with, and at the end the number of compared requests over all
processes."""

from __future__ import annotations

from typing import Any

import pytest

from support.parity.counting import Comparisons

COMPARISONS = pytest.StashKey[Comparisons]()
SUMMARY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton",
        choices=("recorded", "live", "record"),
        default="recorded",
        help="what tests/parity compares rocserve with: Triton's recorded answers, or a running Triton (live), whose"
        " answers must be the recorded ones, or are recorded anew (record)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPARISONS] = Comparisons(recorded=config.getoption("triton") == "recorded")
    config.stash[SUMMARY] = []


@pytest.fixture(scope="session")
def comparisons(pytestconfig: pytest.Config) -> Comparisons:
    return pytestconfig.stash[COMPARISONS]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    compared = session.config.stash[COMPARISONS]
    if not compared.requests:
        return
    lines = session.config.stash[SUMMARY]
    lines += [f"deliberate: {difference.reason} ({len(difference.exchanges)})" for difference in compared.differences]
    lines.append(str(compared))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity"] = lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A process that crashed has no output.
    node.config.stash[SUMMARY] += getattr(node, "workeroutput", {}).get("parity", ())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[SUMMARY]:
        terminalreporter.section("parity with Triton")
        for line in config.stash[SUMMARY]:
            terminalreporter.write_line(line)
