from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.config.model_folder import ModelFolder, is_version_name, select_versions
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.plain import version_policy
from rocserve.core.model_config import VersionPolicy


def _policy(text: str) -> VersionPolicy:
    return version_policy(parse_model_config(f"version_policy {{ {text} }}", "config.pbtxt").version_policy)


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        ("", (0, 1, 3, 12)),
        ("latest { }", ()),
        ("latest { num_versions: 2 }", (3, 12)),
        ("latest { num_versions: 9 }", (0, 1, 3, 12)),
        ("all { }", (0, 1, 3, 12)),
        ("specific { versions: [3, 1] }", (1, 3)),
        ("specific { versions: [3, 7] }", (3,)),
        ("specific { versions: [7] }", ()),
    ],
)
def test_selection(policy: str, selected: tuple[int, ...]) -> None:
    assert select_versions(_policy(policy), [12, 1, 3, 0]) == selected


def test_nothing_available() -> None:
    for policy in (VersionPolicy(), VersionPolicy(latest=1), VersionPolicy(specific=(1,))):
        assert select_versions(policy, []) == ()


def test_versions_of_a_folder(tmp_path: Path) -> None:
    for name in ("0", "1", "10", "2", "01", "warmup", "1.5", "-3", "٣", ".4"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").write_text("a file")
    assert ModelFolder(tmp_path).versions == (0, 1, 2, 10)
    assert ModelFolder(tmp_path / "absent").versions == ()
    assert ModelFolder(tmp_path).ignored_versions == (
        "ignore version directory '01' which contains leading zeros in its directory name",
    )


def test_a_version_fits_63_bits() -> None:
    assert is_version_name(str(2**63 - 1))
    assert not is_version_name(str(2**63))
    assert not is_version_name("9" * 25)
