"""The folders of the models that are made beside another one."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rocserve.backends.registry import discover_backends
from rocserve.config.image_models import MadeModel
from rocserve.repository.content import ContentReader
from rocserve.settings import RepositorySettings


async def test_workers_of_any_user_may_read_them() -> None:
    files = {
        PurePosixPath("1/model.py"): b"",
        PurePosixPath("config.pbtxt"): b'name: "m_postprocess" backend: "python"',
    }
    reader = ContentReader(discover_backends(), RepositorySettings(roots=(Path("/nowhere"),)))
    contents = reader.read_made((MadeModel("m_postprocess", files),), "")
    folder = contents[0].scan.folder
    for path in (folder.parent, folder, folder / "1", folder / "1" / "model.py"):
        assert path.stat().st_mode & (0o005 if path.is_dir() else 0o004)
