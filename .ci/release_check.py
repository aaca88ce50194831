"""Checks a release: builds the packages, installs them in fresh environments, and runs the demo from them.

Run: release_check.py [--tag v0.2.0]. The server, the tools and the client come from the wheels, the sample and the
examples from the source distribution; of the checkout only the pictures of digits are read.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO_NEEDS = ("tritonclient[grpc]>=2.60", "scikit-image>=0.22")
"""The demo sends requests with Triton's client too, and reads photographs."""
WHERE = """
import rocserve, rocserve_client, rocserve_tools
print(rocserve.__file__, rocserve_client.__file__, rocserve_tools.__file__)
"""
OF_CLIENT = """
from importlib.metadata import version
from rocserve_client import AsyncClient, Client
print(version("rocserve-client"))
"""


class ReleaseError(Exception):
    """The release is not fit to be published; the text says why."""


def release(root: Path, tag: str = "") -> str:
    """Return the version if pyproject.toml, the package, the first heading of the change log, and the tag agree."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    package = (root / "server/rocserve/__init__.py").read_text()
    if f'__version__ = "{version}"' not in package:
        raise ReleaseError(f'expected __version__ = "{version}" in server/rocserve/__init__.py, as in pyproject.toml')
    heading = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None or not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading[1]):
        found = heading[1] if heading else "none"
        raise ReleaseError(f"expected the heading '## {version} - DATE' first in CHANGELOG.md, got '{found}'")
    if tag and tag != f"v{version}":
        raise ReleaseError(f"expected the tag v{version}, got {tag}")
    return version


def run(*command: str | Path, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command that must succeed, and return what it has printed."""
    print("+", *command, flush=True)
    ran = subprocess.run(
        command, cwd=folder, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode:
        raise ReleaseError(f"exit status {ran.returncode}:\n{ran.stdout}")
    return ran.stdout


def build(folder: Path) -> tuple[Path, Path, Path]:
    """Build the server's wheel (from the source distribution), the client's, and the source distribution."""
    run(sys.executable, "-m", "build", "--outdir", folder, folder=ROOT)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, "clients", folder=ROOT)
    (source,) = folder.glob("rocserve-*.tar.gz")
    (server,) = folder.glob("rocserve-*.whl")
    (client,) = folder.glob("rocserve_client-*.whl")
    return server, client, source


def check(folder: Path, tag: str) -> None:
    version = release(ROOT, tag)
    server, client, source = build(folder / "dist")
    for package in (server, client, source):
        if f"-{version}" not in package.name:
            raise ReleaseError(f"expected version {version}, got {package.name}")
        print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    alone = fresh(folder / "client", str(client), environment=environment)
    found = run(alone, "-c", OF_CLIENT, folder=folder, environment=environment).strip()
    if found != version:
        raise ReleaseError(f"expected version {version} of rocserve-client, got {found}")
    python = fresh(folder / "server", f"rocserve[cpu,tools] @ {server.as_uri()}", *DEMO_NEEDS, environment=environment)
    for place in run(python, "-c", WHERE, folder=folder, environment=environment).split():
        if not Path(place).is_relative_to(folder):
            raise ReleaseError(f"expected the installed package, got {place}")
    with tarfile.open(source) as packed:
        packed.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    for name in ("server", "tools"):
        (unpacked / name).rename(unpacked / f"{name}.away")  # So that nothing is imported from there.
    print(run(python.with_name("rocserve"), "--version", folder=unpacked, environment=environment).strip())
    demo = ("clients/examples/demo.py", "--images", ROOT / "tests/data/digits", "--output", folder / "demo")
    print(run(python, *demo, folder=unpacked, environment=environment))
    print(f"release {version}: both wheels and the source distribution work")


def fresh(folder: Path, *packages: str, environment: Mapping[str, str]) -> Path:
    """Make a virtual environment with these packages, and return its Python."""
    run(sys.executable, "-m", "venv", folder, folder=ROOT)
    python = folder / "bin/python"
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(python, *install, *packages, folder=folder, environment=environment)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="", help="the tag of the release, which must be its version with a v")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rocserve-release-") as made:
        folder = Path(made)
        folder.chmod(0o755)  # Workers of a server that root has started run as nobody.
        try:
            check(folder, options.tag)
        except ReleaseError as error:
            print(f"release check: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
