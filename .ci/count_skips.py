"""Fails when more tests were skipped than are allowed: `count_skips.py REPORT.xml ALLOWED`."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def main(report: str, allowed: int) -> int:
    skipped = [
        (case.get("classname", ""), case.get("name", ""), skip.get("message", ""))
        for case in ElementTree.parse(report).iter("testcase")
        for skip in case.iter("skipped")
    ]
    for classname, name, reason in skipped:
        print(f"skipped: {classname}.{name}: {reason}")
    print(f"{len(skipped)} skipped, {allowed} allowed")
    return 0 if len(skipped) <= allowed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
