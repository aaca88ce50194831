"""What workers get of the server's environment, and whom they run as."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rocserve.settings import WorkerSettings
from rocserve.workers.isolation import Confinement, Identity, candidates, choose, find_user, worker_environment

NOBODY = Identity("nobody", 65534, 65534, (65534,))
ROOT = Identity("root", 0, 0, (0,))
ROOT_WITH_ALL = Identity("root", 0, 0, (0,), keeps_capabilities=True)


def test_variables_that_may_be_secrets_are_passed_on_by_name_only():
    needed = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "PYTHONPATH": "/p",
        "HIP_VISIBLE_DEVICES": "0",
        "NVIDIA_VISIBLE_DEVICES": "0",
    }
    secret = {"NVIDIA_API_KEY": "k", "ROCSERVE_TOKEN": "t", "HF_TOKEN": "h", "https_proxy": "http://me:secret@proxy"}
    environment = {**needed, **secret}
    assert worker_environment(environment, WorkerSettings()) == needed
    settings = WorkerSettings(environment=(("", "HF_TOKEN"), ("m", "ROCSERVE_TOKEN"), ("m", "MISSING")))
    assert worker_environment(environment, settings) == {**needed, "HF_TOKEN": "h"}
    assert worker_environment(environment, settings, "m") == {"ROCSERVE_TOKEN": "t"}
    assert worker_environment(environment, settings, "n") == {}


def test_a_server_that_is_not_root_has_no_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert candidates(WorkerSettings()) == candidates(WorkerSettings(user="same")) == ()
    assert candidates(WorkerSettings(user="1000")) == ()
    with pytest.raises(ValueError, match="only a server that runs as root can start workers as user 'nobody'"):
        candidates(WorkerSettings(user="nobody"))


def test_users_that_no_file_knows_have_their_number_as_group():
    user = find_user("4242:99")
    assert (user.uid, user.gid) == (4242, 99)
    assert find_user("4242").gid == 4242


@pytest.mark.parametrize("number", [2**32 - 1, 2**32, 10**20])
def test_numbers_that_no_user_or_group_can_have_are_refused(number: int):
    """To the kernel the first means that a process stays who it is, which is root."""
    with pytest.raises(ValueError, match=f"there is no user '{number}'"):
        find_user(str(number))
    with pytest.raises(ValueError, match=f"there is no group '{number}'"):
        find_user(f"4242:{number}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
class TestChoice:
    def choose(self, tmp_path: Path, *identities: Identity, writable: str = "") -> tuple[Identity | None, str]:
        chosen = choose(Confinement(identities), (str(tmp_path),), (writable,) if writable else (), ())
        assert (os.geteuid(), os.getegid()) == (0, 0)
        assert int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16) != 0
        return chosen

    def test_without_candidates_there_is_nothing_to_choose(self, tmp_path: Path):
        assert self.choose(tmp_path) == (None, "")

    def test_a_file_that_is_not_theirs_leaves_root_without_capabilities(self, tmp_path: Path):
        identity, problem = self.choose(tmp_path, NOBODY, ROOT, ROOT_WITH_ALL)
        assert identity == ROOT
        assert problem.startswith("root: user 'nobody' cannot read /")

    def test_a_file_of_neither_leaves_root_as_it_was(self, tmp_path: Path):
        (tmp_path / "model.py").touch(0o600)
        os.chown(tmp_path / "model.py", 4242, 4242)
        identity, problem = self.choose(tmp_path, NOBODY, ROOT, ROOT_WITH_ALL)
        assert identity == ROOT_WITH_ALL
        assert "user root cannot read" in problem
        with pytest.raises(PermissionError, match=f"user root cannot read {tmp_path}/model.py"):
            self.choose(tmp_path, NOBODY, ROOT)

    def test_links_that_lead_nowhere_are_nobodys_business(self, tmp_path: Path):
        (tmp_path / "lost").symlink_to("/nowhere/at/all")
        assert self.choose(tmp_path, ROOT) == (ROOT, "")

    def test_a_folder_that_is_yet_to_be_made_needs_one_to_make_it_in(self):
        assert self.choose(Path("/usr/bin/env"), NOBODY, writable="/tmp/rocserve-not-there/cache") == (NOBODY, "")
        with pytest.raises(PermissionError, match="user 'nobody' cannot write to /usr"):
            self.choose(Path("/usr/bin/env"), NOBODY, writable="/usr/rocserve-not-there/cache")
