"""Fails when more tests were skipped than are allowed: `count_skips.py REPORT.xml ALLOWED [REASON ...]`.

Skips whose reason begins with one of the REASONs are counted by themselves and allowed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def main(report: str, allowed: int, *excused: str) -> int:
    skipped = [
        (case.get("classname", ""), case.get("name", ""), skip.get("message", ""))
        for case in ElementTree.parse(report).iter("testcase")
        for skip in case.iter("skipped")
    ]
    counted = [skip for skip in skipped if not skip[2].startswith(excused)]
    for classname, name, reason in counted:
        print(f"skipped: {classname}.{name}: {reason}")
    for reason in excused:
        print(f"{sum(skip[2].startswith(reason) for skip in skipped)} skipped for this reason: {reason}")
    print(f"{len(counted)} skipped, {allowed} allowed")
    return 0 if len(counted) <= allowed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
