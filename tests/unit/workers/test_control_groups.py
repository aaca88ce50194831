"""Cgroups, on a folder that stands for their tree: what is written in which order, and the effect of refusals; the
workers' environment, and their user."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.waiting import until

from rocserve.settings import WorkerSettings
from rocserve.workers import control_groups
from rocserve.workers.control_groups import ControlGroup, ControlGroups, NotDelegated, enter, take_delegation
from rocserve.workers.isolation import Confinement, Identity, candidates, choose, find_user, worker_environment
from rocserve.workers.resource_watch import ResourceWatch

MIB = 1 << 20
OWN = "system.slice/rocserve.service"


class Tree:
    """A cgroup's folder as the kernel shows it, and what is written to its files, which need not exist."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes = place / "proc"
        self.folder = place / "cgroup" / OWN
        self.written: list[str] = []
        self.refused: dict[str, int] = {}
        """Error numbers by the ends of files' paths."""
        self.marks = {"user.delegate": b"1"}
        (self.processes / "self").mkdir(parents=True)
        self.folder.mkdir(parents=True)
        self.show(f"0::/{OWN}\n", f"41 31 0:38 / {place}/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n")
        (self.folder / "cgroup.controllers").write_text("cpu io memory pids\n")
        (self.folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
        (self.folder / "cgroup.kill").write_text("")
        monkeypatch.setattr(control_groups, "_write", self.write)
        monkeypatch.setattr(os, "getxattr", self.mark)

    def show(self, groups: str, mounts: str) -> None:
        (self.processes / "self/cgroup").write_text(groups)
        (self.processes / "self/mountinfo").write_text(f"23 1 259:0 / / rw - ext4 /dev/vda rw\n{mounts}")

    def write(self, file: Path, text: str) -> None:
        name = str(file.relative_to(self.folder))
        self.written.append(f"{name} {text}")
        for end, number in self.refused.items():
            if name.endswith(end):
                raise OSError(number, os.strerror(number), str(file))

    def mark(self, path: Path, name: str) -> bytes:
        if path != self.folder or name not in self.marks:
            raise OSError(errno.ENODATA, "no such attribute")
        return self.marks[name]

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in self.folder.iterdir() if entry.is_dir())


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_the_server_leaves_its_cgroup_before_that_hands_anything_on(tree: Tree) -> None:
    assert take_delegation(tree.processes).folder == tree.folder
    assert tree.written == ["server/cgroup.procs 0", "cgroup.subtree_control +memory +pids"]
    assert tree.folders() == ["server"]


def test_what_a_killed_server_has_left_is_removed(tree: Tree) -> None:
    (tree.folder / "worker-1-1").mkdir()
    (tree.folder / "worker-1-2" / "still_used").mkdir(parents=True)
    take_delegation(tree.processes)
    assert tree.folders() == ["server", "worker-1-2"]


def test_a_container_sees_a_part_of_the_tree(tree: Tree) -> None:
    tree.show(
        "1:name=systemd:/\n0::/pods/p1\n", f"41 31 0:38 /pods/p1 {tree.folder} rw shared:9 - cgroup2 cgroup2 rw\n"
    )
    assert take_delegation(tree.processes).folder == tree.folder


@pytest.mark.parametrize(
    ("groups", "mounts"),
    [
        ("4:memory:/x\n", "41 31 0:38 / {} rw - cgroup2 cgroup2 rw\n"),
        ("0::/\n", "32 31 0:29 / {} rw - cgroup cgroup rw,memory\n"),
        ("0::/elsewhere\n", "41 31 0:38 /pods/p1 {} rw - cgroup2 cgroup2 rw\n"),
        ("0::/pods/p10\n", "41 31 0:38 /pods/p1 {} rw - cgroup2 cgroup2 rw\n"),
        ("0::/../outside\n", "41 31 0:38 / {} rw - cgroup2 cgroup2 rw\n"),
        ("0::/gone\n", "41 31 0:38 / {} rw - cgroup2 cgroup2 rw\n"),
    ],
)
def test_without_a_cgroup_of_version_2_nothing_is_done(tree: Tree, groups: str, mounts: str) -> None:
    tree.show(groups, mounts.format(tree.folder))
    with pytest.raises(NotDelegated, match="no cgroup of version 2 is visible here"):
        take_delegation(tree.processes)
    assert tree.written == []


def test_a_cgroup_that_nobody_has_marked_is_left_alone(tree: Tree) -> None:
    for marks in ({}, {"user.delegate": b"0"}):
        tree.marks = marks
        with pytest.raises(NotDelegated, match="the server's cgroup is not delegated to it"):
            take_delegation(tree.processes)
    assert tree.written == [] and tree.folders() == []
    tree.marks = {"trusted.delegate": b"1"}
    take_delegation(tree.processes)


def test_a_cgroup_that_is_not_the_servers_alone_or_lacks_something_is_left_alone(tree: Tree) -> None:
    for file, text, reason in (
        ("cgroup.controllers", "cpu memory\n", "lacks the controllers pids"),
        ("cgroup.procs", f"1\n{os.getpid()}\n", "other processes are in the server's cgroup"),
        ("cgroup.kill", None, "the kernel is older than Linux 5.14"),
    ):
        before = (tree.folder / file).read_text()
        if text is None:
            (tree.folder / file).unlink()
        else:
            (tree.folder / file).write_text(text)
        with pytest.raises(NotDelegated, match=reason):
            take_delegation(tree.processes)
        (tree.folder / file).write_text(before)
    assert tree.written == [] and tree.folders() == []


@pytest.mark.parametrize("file", ["server/cgroup.procs", "cgroup.subtree_control"])
def test_the_server_goes_back_where_the_kernel_refuses(tree: Tree, file: str) -> None:
    tree.refused[file] = errno.EACCES
    with pytest.raises(NotDelegated, match=f"the server cannot make cgroups: .*{file}"):
        take_delegation(tree.processes)
    assert tree.written[-1] == "cgroup.procs 0"
    assert tree.folders() == []


def test_a_worker_gets_its_bounds_before_it_enters(tree: Tree) -> None:
    groups = ControlGroups(tree.folder)
    both, tasks = groups.create(300 * MIB, 40), groups.create(0, 40)
    enter(str(both.folder))
    first, second = both.folder.name, tasks.folder.name
    assert tree.written == [
        f"{first}/memory.max 314572800",
        f"{first}/memory.swap.max 0",
        f"{first}/memory.oom.group 1",
        f"{first}/pids.max 40",
        f"{second}/pids.max 40",
        f"{first}/cgroup.procs 0",
    ]


def test_a_kernel_without_swap_needs_no_bound_of_it(tree: Tree) -> None:
    tree.refused["memory.swap.max"] = errno.ENOENT
    assert ControlGroups(tree.folder).create(MIB, 0).folder.is_dir()


@pytest.mark.parametrize("file", ["memory.max", "memory.swap.max", "memory.oom.group", "pids.max"])
def test_a_cgroup_without_its_bounds_is_none(tree: Tree, file: str) -> None:
    tree.refused[file] = errno.EACCES
    with pytest.raises(PermissionError):
        ControlGroups(tree.folder).create(MIB, 40)
    assert tree.folders() == []


@pytest.mark.parametrize(
    ("memory_events", "pids_events", "tasks", "reason"),
    [
        ("oom 1\noom_kill 2\noom_group_kill 1\n", "max 0\n", 3, "memory limit of 1048576 bytes exceeded"),
        ("oom 1\noom_kill 0\n", "max 0\n", 3, ""),
        # The limit of the cgroup around it.
        ("oom 0\noom_kill 1\n", "max 0\n", 3, ""),
        ("oom 0\noom_kill 0\n", "max 7\n", 40, "limit of 40 tasks exceeded"),
        ("oom 0\noom_kill 0\n", "max 7\n", 12, ""),
        ("oom 0\noom_kill 0\n", "max 0\n", 40, ""),
    ],
)
def test_by_what_a_worker_has_too_much(
    tmp_path: Path, memory_events: str, pids_events: str, tasks: int, reason: str
) -> None:
    (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\n{memory_events}")
    (tmp_path / "pids.events").write_text(pids_events)
    (tmp_path / "pids.current").write_text(f"{tasks}\n")
    group = ControlGroup(tmp_path, MIB, 40)
    assert group.excess() == reason
    assert group.was_refused_tasks() == (pids_events == "max 7\n")
    assert ControlGroup(tmp_path, 0, 0).excess() == ""
    assert ControlGroup(tmp_path / "gone", MIB, 40).excess() == ""


class Worker:
    """Ends on request."""

    pid = 1

    def __init__(self) -> None:
        self.has_ended = False
        self.reasons: list[str] = []

    def end_because(self, reason: str, exceeds_limit: bool) -> None:
        assert exceeds_limit
        self.reasons.append(reason)


async def test_a_cgroup_is_removed_when_its_worker_and_all_else_in_it_have_ended(tree: Tree) -> None:
    group = ControlGroups(tree.folder).create(0, 40)
    name = group.folder.name
    left, worker, watch = group.folder / "process", Worker(), ResourceWatch()
    left.touch()
    (group.folder / "pids.events").write_text("max 1\n")
    (group.folder / "pids.current").write_text("40\n")
    watch.add_grouped(group, worker)
    await until(lambda: worker.reasons)
    assert worker.reasons == ["limit of 40 tasks exceeded"] and tree.written[-1] == f"{name}/cgroup.kill 1"
    worker.has_ended = True
    tree.written.clear()
    await until(lambda: len(tree.written) > 1)
    assert group.folder.is_dir()
    for file in group.folder.iterdir():
        file.unlink()
    await until(lambda: not group.folder.exists())
    assert worker.reasons == ["limit of 40 tasks exceeded"]
    await watch.close()


async def test_the_end_of_the_server_removes_the_cgroups_of_all(tree: Tree) -> None:
    groups, watch = ControlGroups(tree.folder), ResourceWatch()
    watch.add_grouped(groups.create(MIB, 0), Worker())
    watch.add_grouped(groups.create(MIB, 0), None)
    await watch.close()
    assert tree.folders() == []


NOBODY = Identity("nobody", 65534, 65534, (65534,))
ROOT = Identity("root", 0, 0, (0,))
ROOT_WITH_ALL = Identity("root", 0, 0, (0,), keeps_capabilities=True)


def test_variables_that_may_be_secrets_are_passed_on_by_name_only():
    needed = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "LOCPATH": "/home/me/locales",
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
    """For the kernel the first one means that a process keeps its user, which is root."""
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
