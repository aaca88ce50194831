"""Returns the command that installs the packages of an extra of rocserve, such as `tools`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return the command that installs an extra: of the checkout that rocserve was installed from; else the packages
    themselves. PyPI has no project of rocserve's name, and pip must never be asked for one: anybody could register it,
    and pip would run their code."""
    # Here: its import takes 15 ms, and few starts of the server need it.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution("rocserve")
        origin, requirements = installed.read_text("direct_url.json"), installed.requires or ()
    except PackageNotFoundError:  # It runs from a folder on Python's path, which is not installed.
        return f"pip install '.[{extra}]', in a checkout of rocserve"
    return _command(extra, origin or "{}", requirements)


def _command(extra: str, origin: str, requirements: list[str] | tuple[str, ...]) -> str:
    """`origin`: direct_url.json, which pip writes for packages that do not come from an index (packaging.python.org).
    `requirements`: the lines Requires-Dist of the metadata."""
    recorded = json.loads(origin)
    url = urlsplit(recorded.get("url", ""))
    folder = Path(unquote(url.path))
    if url.scheme == "file" and "dir_info" in recorded and (folder / "pyproject.toml").is_file():
        editable = "-e " if recorded["dir_info"].get("editable") else ""
        return f"pip install {editable}{quote(f'{folder}[{extra}]')}"
    lines = (line.partition(";") for line in requirements)
    packages = [
        package.strip()
        for package, _, marker in lines
        if (of := re.search(r"""extra == (["'])(.+?)\1""", marker)) and of[2] == extra
    ]
    return f"pip install {' '.join(map(quote, packages))}"
