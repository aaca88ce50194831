"""Adds the server's modules that the client imports, directly or not, to the client's wheel: types and messages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SERVER, _CLIENT = "rocserve", "rocserve_client"


class SharedModules(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        server = Path(self.root).parent / "server"
        included = build_data["force_include"]
        included[str(server.parent / "LICENSE")] = f"{_CLIENT}/LICENSE"
        for file in sorted(shared_files(Path(self.root) / _CLIENT, server)):
            included[str(file)] = str(file.relative_to(server))


def shared_files(client: Path, server: Path) -> set[Path]:
    """Return the server's files that the client needs."""
    found: set[Path] = set()
    unread = list(client.rglob("*.py"))
    while unread:
        for name in imports(unread.pop()):
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                module = server.joinpath(*parts[:count])
                file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                if file.is_file() and file not in found:
                    found.add(file)
                    unread.append(file)
    return found


def imports(file: Path) -> Iterator[str]:
    """Yield the names below the server's package that a file imports when it runs. A name may be one of a module."""
    unread: list[ast.AST] = [ast.parse(file.read_text())]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unread += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] == _SERVER)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == _SERVER:
            yield from (f"{node.module}.{one.name}" for one in node.names)
        unread += ast.iter_child_nodes(node)
