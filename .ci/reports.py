"""Reads reports of tests (JUnit's XML): whether too many were skipped."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence


def cases(reports: Sequence[str]) -> Iterator[ElementTree.Element]:
    for report in reports:
        yield from ElementTree.parse(report).iter("testcase")


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
    sys.exit(not check_skips(arguments.reports, arguments.allowed, arguments.excused))
