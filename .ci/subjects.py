"""Checks subjects of commits: `area: imperative verb ...`, at most 72 characters.

Run: subjects.py FILE, the message of one commit (the commit-msg hook); subjects.py, all commits after BASE (CI).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

BASE = "6f658cea9d4f263a310204127ded7c6f27369e2f"
"""The last commit before this check. Earlier subjects are longer, and stay."""
LONGEST = 72
"""Characters: what `git log --oneline` shows on a terminal of 80 columns."""
FORM = re.compile(r"[A-Za-z][\w ,./-]*: (?P<verb>[a-z]+(?:-[a-z]+)*)\b.*[^.\s]")
NO_VERB = re.compile(
    r"an?|all|also|and|are|as|by|does|each|for|from|has|if|in|is|its?|more|new|no|not|now|of|on|only|or|some|that|the|there"
    r"|these|this|to|was|what|when|where|which|with|\w+ing|\w+ed"
)
VERBS = frozenset({"bring", "embed", "exceed", "feed", "need", "proceed", "ring", "seed", "shed", "speed", "succeed"})
"""Imperatives that end as participles do."""
GIT_WRITES = re.compile(r'Merge |Revert "')
FOR_REBASE = re.compile(r"(?:fixup|squash|amend)! ")


def fault(subject: str) -> str:
    """Return what is wrong with a subject; "" = nothing."""
    if GIT_WRITES.match(subject):
        return ""
    if len(subject) > LONGEST:
        return f"expected at most {LONGEST} characters, got {len(subject)}: put the why into the body"
    found = FORM.fullmatch(subject)
    if found is None:
        return "expected 'area: imperative verb ...' with the verb in lower case and without a full stop"
    verb = found["verb"]
    if NO_VERB.fullmatch(verb) and verb not in VERBS:
        return f"expected an imperative verb behind the area, such as 'add', got '{verb}'"
    return ""


def of_message(text: str) -> Iterator[str]:
    """Yield the subject of a message that a user writes: the first line that is not empty."""
    subject = next((line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if not FOR_REBASE.match(subject):
        yield subject


def of_history() -> Iterator[str]:
    """Yield the subjects after BASE; none if this history does not have BASE, as in a shallow clone."""
    has_base = subprocess.run(["git", "merge-base", "--is-ancestor", BASE, "HEAD"], check=False, capture_output=True)
    if has_base.returncode:
        print(f"the history does not have {BASE}: fetch it to check the subjects after it")
        return
    log = ["git", "log", "--no-merges", "--format=%s", f"{BASE}..HEAD"]
    yield from subprocess.run(log, check=True, capture_output=True, text=True).stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    subjects = list(of_message(Path(arguments[0]).read_text()) if arguments else of_history())
    faults = [(subject, fault(subject)) for subject in subjects if fault(subject)]
    for subject, text in faults:
        print(f"commit subject '{subject}': {text}", file=sys.stderr)
    if not arguments:
        print(f"{len(subjects)} subjects of commits, {len(faults)} with faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
