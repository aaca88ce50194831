"""Reads reports of tests (JUnit's XML): which files took longest, and whether too many were skipped."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence

LONGEST = 20
"""So many files are printed. Those at the top belong into LONGEST_FILES of tests/conftest.py."""


def cases(reports: Sequence[str]) -> Iterator[ElementTree.Element]:
    for report in reports:
        yield from ElementTree.parse(report).iter("testcase")


def print_longest_files(reports: Sequence[str]) -> None:
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for case in cases(reports):
        # A class may follow the module.
        module, _, name = case.get("classname", "").partition(".test_")
        file = f"{module}.test_{name.partition('.')[0]}"
        seconds[file] += float(case.get("time", 0))
        tests[file] += 1
    for file, spent in seconds.most_common(LONGEST):
        print(f"{spent:7.0f} s for {tests[file]} tests: {file}")
    print(f"{sum(seconds.values()):7.0f} s for {sum(tests.values())} tests of {len(tests)} files, over all processes")


def check_skips(reports: Sequence[str], allowed: int, excused: Sequence[str]) -> bool:
    skipped = [
        (case.get("classname", ""), case.get("name", ""), skip.get("message", ""))
        for case in cases(reports)
        for skip in case.iter("skipped")
    ]
    counted = [skip for skip in skipped if not skip[2].startswith(tuple(excused))]
    for classname, name, reason in counted:
        print(f"skipped: {classname}.{name}: {reason}")
    for reason in excused:
        print(f"{sum(skip[2].startswith(reason) for skip in skipped)} skipped for this reason: {reason}")
    print(f"{len(counted)} skipped, {allowed} allowed")
    return len(counted) <= allowed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", nargs="+", required=True)
    parser.add_argument("--allowed", type=int, default=0, help="skips")
    parser.add_argument("--excused", nargs="*", default=[], help="beginnings of reasons that do not count")
    arguments = parser.parse_args()
    print_longest_files(arguments.reports)
    sys.exit(not check_skips(arguments.reports, arguments.allowed, arguments.excused))
