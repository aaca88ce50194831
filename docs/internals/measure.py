"""Prints how much there is to know about the server's code, and fails if it is more than the limits below.

Run: python docs/internals/measure.py [--circles]
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SERVER = Path(__file__).parents[2] / "server"
GENERATED = ("_pb2.py",)


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    """Dotted, as Python imports it."""
    lines: int
    tree: ast.Module

    @property
    def classes(self) -> int:
        return sum(isinstance(node, ast.ClassDef) for node in ast.walk(self.tree))

    @property
    def constants(self) -> Sequence[str]:
        """Names in capitals that the module binds at its top level."""
        names: list[str] = []
        for node in self.tree.body:
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            else:
                continue
            names += [one.id for one in targets if isinstance(one, ast.Name) and one.id.isupper()]
        return names

    def imports(self) -> Iterator[str]:
        """Return what the module imports anywhere, also for types alone: a reader follows these, too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{one.name}" for one in node.names)


def modules() -> Sequence[Module]:
    read = []
    for path in sorted((SERVER / "rocserve").rglob("*.py")):
        if path.name.endswith(GENERATED):
            continue
        text = path.read_text()
        name = ".".join(path.relative_to(SERVER).with_suffix("").parts).removesuffix(".__init__")
        read.append(Module(name, text.count("\n"), ast.parse(text)))
    return read


def circles(read: Sequence[Module]) -> Sequence[Sequence[str]]:
    """Return groups of modules that import each other, directly or through others (Tarjan's components)."""
    names = {one.name for one in read}
    edges = {one.name: sorted(set(one.imports()) & names - {one.name}) for one in read}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[Sequence[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in edges[name]:
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in edges:
        if name not in order:
            visit(name)
    return found


@dataclass(frozen=True, slots=True)
class Measure:
    what: str
    found: int
    most: int
    """What the code may have. Lower it with each change that takes something out."""


def measures(read: Sequence[Module]) -> Sequence[Measure]:
    return (
        Measure("lines", sum(one.lines for one in read), 86_423),
        Measure("modules", len(read), 532),
        Measure("classes", sum(one.classes for one in read), 947),
        Measure("constants of modules", sum(len(one.constants) for one in read), 848),
        Measure("groups of modules that import each other", len(circles(read)), 0),
    )


def main() -> int:
    """Print the measures, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--circles", action="store_true", help="name the modules that import each other")
    arguments = parser.parse_args()
    read = modules()
    found = measures(read)
    print("server/rocserve, without generated modules:")
    for one in found:
        above = f"  ABOVE ITS LIMIT, {one.most:,}" if one.found > one.most else ""
        print(f"  {one.what:42}{one.found:8,}{above}")
    if arguments.circles:
        for group in circles(read):
            print("  " + ", ".join(group))
    return int(any(one.found > one.most for one in found))


if __name__ == "__main__":
    sys.exit(main())
