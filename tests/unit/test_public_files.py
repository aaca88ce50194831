"""Workflows, issue forms and the development container: what they name exists. `make lint` checks their schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _jobs(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_exists(workflow: Path) -> None:
    for job in _jobs(workflow).values():
        scripts = "\n".join(step.get("run", "") for step in job["steps"])
        assert set(re.findall(r"\bmake ([a-z-]+)", scripts)) <= TARGETS
        for name in re.findall(r"(?<![\w/])((?:\.ci|tests)(?:/[\w.]+)+)", scripts):
            assert (ROOT / name).exists(), name
        for entry in job.get("strategy", {}).get("matrix", {}).get("include", ()):
            assert (ROOT / "docker" / entry["dockerfile"]).is_file()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: name its version in a comment"


def test_each_part_of_ci_is_a_target() -> None:
    (parts,) = [
        job["strategy"]["matrix"]["part"]
        for name, job in _jobs(ROOT / ".github/workflows/ci.yml").items()
        if name == "parts"
    ]
    assert set(parts) - {"docs"} <= TARGETS


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_ask_what_doctor_prints(form: Path) -> None:
    assert "rocserve doctor" in form.read_text()


def test_the_development_container_is_built_from_our_file() -> None:
    folder = ROOT / ".devcontainer"
    described = json.loads((folder / "devcontainer.json").read_text())
    dockerfile = (folder / described["build"]["dockerfile"]).resolve()
    assert dockerfile.is_file()
    assert (folder / described["build"]["context"]).resolve() == ROOT
    assert f"WORKDIR {described['workspaceFolder']}\n" in dockerfile.read_text()
