"""The installed bindings, each on the real MIGraphX."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.migraphx import find_root
from support.migraphx_programs import ProgramFactory

from rocserve.backends.migraphx.binding import Binding
from rocserve.backends.migraphx.installation import MigraphxInstallation, find_installation
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.core.errors import ServeError
from rocserve.settings import EngineSettings


def _installation() -> MigraphxInstallation | None:
    root = find_root()
    try:
        return find_installation(EngineSettings(migraphx_root=str(root))) if root else None
    except ServeError:
        return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes `binding` once for each installed binding."""
    if "binding" in metafunc.fixturenames:
        installation = _installation()
        has_module = installation is not None and installation.module_folder != ""
        metafunc.parametrize("binding", ["c_api", "module"] if has_module else ["c_api"], indirect=True)


@pytest.fixture(scope="session")
def installation() -> MigraphxInstallation:
    found = _installation()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def bindings(installation: MigraphxInstallation) -> dict[str, Binding]:
    """Bindings, opened when a test asks for them: a library stays in the process."""
    return {}


@pytest.fixture
def binding(
    request: pytest.FixtureRequest, installation: MigraphxInstallation, bindings: dict[str, Binding]
) -> Binding:
    name: str = request.param
    if name not in bindings:
        bindings[name] = open_binding(installation, name)
    bindings[name].take_messages()
    return bindings[name]


@pytest.fixture
def factory(binding: Binding, tmp_path: Path) -> ProgramFactory:
    return ProgramFactory(binding, tmp_path)
