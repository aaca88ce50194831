"""Fails when more tests were skipped than are allowed, in all reports (JUnit's XML) together."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence


def main(reports: Sequence[str], allowed: int, excused: Sequence[str]) -> int:
    skipped = [
        (case.get("classname", ""), case.get("name", ""), skip.get("message", ""))
        for report in reports
        for case in ElementTree.parse(report).iter("testcase")
        for skip in case.iter("skipped")
    ]
    counted = [skip for skip in skipped if not skip[2].startswith(tuple(excused))]
    for classname, name, reason in counted:
        print(f"skipped: {classname}.{name}: {reason}")
    for reason in excused:
        print(f"{sum(skip[2].startswith(reason) for skip in skipped)} skipped for this reason: {reason}")
    print(f"{len(counted)} skipped, {allowed} allowed")
    return 0 if len(counted) <= allowed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reports", nargs="+", required=True)
    parser.add_argument("--allowed", type=int, required=True)
    parser.add_argument("--excused", nargs="*", default=[], help="beginnings of reasons that do not count")
    arguments = parser.parse_args()
    sys.exit(main(arguments.reports, arguments.allowed, arguments.excused))
