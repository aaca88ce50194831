"""The pages: links lead somewhere, the index is complete, contents equal the headings, and flags are the settings'."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from support.migraphx import CHECKOUT

FOLDERS = ("benchmarks", "clients", "docs", "findings", "model_repository", "server", "tests", "tools")
PAGES = [*sorted(CHECKOUT.glob("*.md")), *sorted(page for name in FOLDERS for page in (CHECKOUT / name).rglob("*.md"))]
GUIDES = [path for path in PAGES if path.is_relative_to(CHECKOUT / "docs") and path.name != "README.md"]
LONG_ENOUGH_FOR_CONTENTS = 9
"""Headings. A shorter page is one to three screens and has no contents, which would come before what readers want."""
NAMED = re.compile(r"\bdocs/[a-z/-]+\.md(?:#[\w-]+)?")
"""A page, and perhaps a heading, that code names."""
CODE = (".html", ".js", ".py", ".service", ".sh", ".toml", ".yaml", ".yml")


def _prose(page: Path) -> str:
    """The page without code blocks, in which brackets and number signs have other meanings."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _anchors(page: Path) -> list[str]:
    return [_anchor(heading) for heading in re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)]


def _links(page: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", _prose(page))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"https?://|mailto:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in _anchors(target), f"{link}: {target.name} has {', '.join(_anchors(target))}"


@pytest.mark.parametrize("folder", [*FOLDERS, ".github", "deploy", "docker"])
def test_pages_that_code_names_are_there(folder: str) -> None:
    for file in (CHECKOUT / folder).rglob("*"):
        if file.suffix not in CODE or not file.is_file():
            continue
        for name in NAMED.findall(file.read_text()):
            page, _, anchor = name.partition("#")
            assert (CHECKOUT / page).is_file(), f"{file}: there is no {page}"
            assert not anchor or anchor in _anchors(CHECKOUT / page), f"{file}: {page} has no heading {anchor}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_contents_on_top_are_the_headings(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", _prose(page), re.MULTILINE)
    if len(headings) < LONG_ENOUGH_FOR_CONTENTS:
        assert not re.search(r"^- \[[^\]]*\]\(#[^)]*\)\n- \[", page.read_text(), re.MULTILINE), "too short for contents"
        return
    contents = "".join(f"- [{heading.replace('`', '')}](#{_anchor(heading)})\n" for heading in headings)
    assert f"\n\n{contents}\n" in page.read_text().partition("\n## ")[0] + "\n", f"its contents are:\n{contents}"


def test_the_index_has_every_page() -> None:
    index = CHECKOUT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in _links(index)}
    assert set(GUIDES) <= linked


def test_the_page_of_flags_is_made_of_the_settings() -> None:
    """`make flags-page` writes it."""
    script = runpy.run_path(str(CHECKOUT / "docs/write_flags.py"))
    assert script["PAGE"].read_text() == script["page"]()
