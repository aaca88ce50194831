"""Finds words that make readers stumble, in Python, JavaScript and Markdown, and fails if there are any.

Run: python docs/internals/words.py [FILE ...]     without files: all files of the repository
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("*.py", "*.js", "*.md")
SKIPPED = (
    "docs/internals/words.py",
    "tests/unit/test_words.py",  # It contains the words as test data.
    "tests/support/parity/bad_configurations.py",  # A digest of its texts is recorded.
    "tests/data/",  # Recorded texts and files of third parties.
)

NAMES = {"come": "arrived", "there": "present", "around": "context", "said": "stated", "each": "one"}
"""Names of variables that read as another part of speech, and what a better name may be."""


@dataclass(frozen=True, slots=True)
class Rule:
    words: str
    """A regular expression; a space in it stands for any white space."""
    instead: str
    fine: tuple[str, ...] = ()
    """Longer expressions in which the words stay."""


RULES = (
    Rule(
        r"\b(?:is|are|was|were|be|been|being) no [\w'`-]+",
        "'is not a ...'",
        (
            r"\bthere(?: \w+){0,3} (?:is|are|was|were|be|been|being) no\b",
            r"\bbe no longer\b|\b(?:is|are|was|were) no (?:longer|more|less|other|better|worse|faster|slower|larger)\b",
        ),
    ),
    Rule(r"\bwhoever\b", "name them: 'a user', 'the caller'"),
    Rule(
        r"\bpass(?:ed|es|ing)? over\b",
        "'ignore' or 'skip'",
        (r"\ba preferred size passed over\b",),  # A digest of this name is recorded.
    ),
    Rule(r"\bof (?:its|his|her|their|your|our|one's) own\b", "'its own ...', 'a separate ...', or nothing"),
    Rule(r"\b(?:comes?|came|coming) to be\b", "'becomes', 'is created'"),
    Rule(r"\b(?:is|are|was|were|be|been|being) told\b", "say who does it: 'the server notifies ...', 'reads', 'logs'"),
    Rule(
        r"\bas (?:it|they) (?:is|are|was|were)(?=[.,;:!?)]|$)",
        "'unchanged', 'raw', 'the current ...'",
        (r"\bas (?:long|far|fast|large|soon|small|many|much|often|good|well) as (?:it|they) (?:is|are|was|were)\b",),
    ),
    Rule(r"\b(?:do|does|did|doing) without\b", "'does not use', 'works without', 'skips'"),
    Rule(r"\b(?:stands?|stood|standing) behind\b", "'follows', 'trails'"),
    Rule(r"\bwill be none\b", "'the peer has closed', 'no further ...'"),
    Rule(r"\bcomes? whole\b|\bcame whole\b", "'is complete', 'was fully received'"),
    Rule(r"\bwhat (?:it|they) (?:was|were|is|are) at\b", "name the work"),
    Rule(r"\b(?:broken?|breaks?|broke|breaking) off\b", "'stopped', 'cancelled', 'cut off'"),
    Rule(r"\b(?:is|are|was|were) nothing for\b", "'unexpected ...', 'does not belong in ...'"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A text in a file, such as a docstring."""

    line: int
    """The first."""
    text: str
    source: str = ""
    """The text's lines in the file, where `text` has lost them; their first is `line`."""

    def line_of(self, start: int, words: str) -> int:
        if not self.source:
            return self.line + self.text.count("\n", 0, start)
        between = r"[\s\"'f]+"  # The literals of a joined string, too.
        found = re.search(between.join(map(re.escape, words.split())), self.source)
        return self.line + (self.source.count("\n", 0, found.start()) if found else 0)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    file: str
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: '{self.words}': write {self.instead}"


def spaced(expression: str) -> re.Pattern[str]:
    """Compile an expression whose spaces match line ends, and what begins a comment's next line, too."""
    return re.compile(expression.replace(" ", r"(?:\s+(?:#|//|\*)?\s*)"), re.IGNORECASE)


COMPILED = tuple((spaced(rule.words), rule.instead, tuple(map(spaced, rule.fine))) for rule in RULES)
ANY = spaced("|".join(rule.words for rule in RULES))


def findings_in(file: str, pieces: Iterator[Piece]) -> Iterator[Finding]:
    for piece in pieces:
        if not ANY.search(piece.text):
            continue
        for words, instead, exceptions in COMPILED:
            for match in words.finditer(piece.text):
                fine = (one.span() for exception in exceptions for one in exception.finditer(piece.text))
                if not any(start < match.end() and match.start() < end for start, end in fine):
                    line = piece.line_of(match.start(), match[0])
                    yield Finding(file, line, " ".join(re.sub(r"\s(?:#|//|\*)", " ", match[0]).split()), instead)


def pieces_of_python(text: str, nodes: Sequence[ast.AST]) -> Iterator[Piece]:
    """Yield string literals, joined ones as one, and comments, those of consecutive lines as one."""
    lines = text.splitlines(keepends=True)
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
            yield Piece(node.lineno, "".join(map(str, parts)), "".join(lines[node.lineno - 1 : node.end_lineno]))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Piece(node.lineno, node.value, "".join(lines[node.lineno - 1 : node.end_lineno]))
    first, comment = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if comment and line == first + comment.count("\n"):
                comment += token.string + "\n"
                continue
            if comment:
                yield Piece(first, comment)
            first, comment = line, token.string + "\n"
    if comment:
        yield Piece(first, comment)


def names_in_python(file: str, nodes: Sequence[ast.AST]) -> Iterator[Finding]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in NAMES:
            yield Finding(file, node.lineno, name, f"another name for the variable, such as '{NAMES[name]}'")


def findings_of(path: Path, file: str) -> Sequence[Finding]:
    text = path.read_text()
    if path.suffix != ".py":
        return sorted(set(findings_in(file, iter((Piece(1, text),)))))
    nodes = [*ast.walk(ast.parse(text))]
    return sorted({*findings_in(file, pieces_of_python(text, nodes)), *names_in_python(file, nodes)})


def files() -> Sequence[str]:
    """Return the files that git knows or would add."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", *KINDS)
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(one for one in set(listed) if not one.startswith(SKIPPED) and (ROOT / one).exists())


def main() -> int:
    """Print what it finds, and return 1 if that is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="only these")
    arguments = parser.parse_args()
    found = [one for file in arguments.files or files() for one in findings_of(ROOT / file, file)]
    for one in found:
        print(one)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
