"""The pages: all are reached from the README, their links lead somewhere, and they know all flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocserve.flags import FLAGS

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("flag", [name for flag in FLAGS for name in (flag.name, *flag.aliases)])
def test_the_page_for_operators_has_each_flag(flag: str) -> None:
    assert re.search(rf"`--{flag}[`=]", (ROOT / "docs" / "operations.md").read_text())


def test_the_readme_leads_to_all_pages() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in PAGES} <= linked


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
