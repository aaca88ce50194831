"""What a worker process may do: its environment, its user, its rights, and bounds that the kernel keeps.

The server says who a worker may run as, in the order of preference (`candidates`). The zygote, which alone may change
users, takes the first who may do what the model needs (`choose`), and the new process becomes that user for good before
any of the model's code runs (`confine`).
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rocserve.settings import KEEP_USER, WorkerSettings
from rocserve.workers.control_groups import enter

_UNPRIVILEGED = "nobody"
"""Who workers run as where nothing is said and the server is root."""
_ROOT = 0
_LARGEST_ID = (1 << 32) - 2
"""Of a user or a group: the next number has the kernel leave it as it is (setresuid(2))."""
_GPU_DEVICES = ("/dev/kfd", "/dev/dri")
_MOST_OPEN_FILES = 65_536
"""Of a worker: far more than engines and loaders of data need, far less than the kernel has."""

# fmt: off
_PASSED_ON = frozenset(
    {
        # Of processes in general.
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "HOSTNAME",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES",
        # Of virtual environments, and where programs keep what they make.
        "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        # Certificates that others are checked against.
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        # Not all that begins with NVIDIA_ and ROCSERVE_: some are secrets.
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE",
        "ROCSERVE_MIGRAPHX_ROOT",
    }
)
_PASSED_ON_PREFIXES = (
    "LC_", "PYTHON", "MALLOC_", "HIP_", "ROCR_", "ROCM_", "HSA_", "AMD_", "GPU_", "CUDA_", "ORT_",
    "MIGRAPHX_", "MIOPEN_", "ROCBLAS_", "HIPBLASLT_", "ROCAL_", "RCCL_", "NCCL_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "OPENCV_",
)
# fmt: on

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
"""The third, with 64 bits for each set (capset(2))."""
_MOST_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """A user that a worker may run as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = ""
    """"" = that of the server's environment."""
    keeps_capabilities: bool = False


@dataclass(frozen=True, slots=True)
class Confinement:
    """What the zygote keeps a new worker to."""

    candidates: tuple[Identity, ...] = ()
    """In the order of preference; empty = the zygote's own user."""
    core_dumps: bool = False
    largest_file_bytes: int = 0
    """0 = no bound."""
    control_group: str = ""
    """The folder of the cgroup that is made for it; "" = that of the zygote."""


def worker_environment(
    environment: Mapping[str, str], settings: WorkerSettings, model_name: str = ""
) -> Mapping[str, str]:
    """What of the server's environment all workers get, the zygote among them; with a model's name, what only the
    workers of that model get."""
    passed_on = {name for model, name in settings.environment if model == model_name}
    if not model_name:
        passed_on |= {name for name in environment if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)}
    return {name: value for name, value in environment.items() if name in passed_on}


# Who


def candidates(settings: WorkerSettings) -> tuple[Identity, ...]:
    """Whom workers may run as, in the order of preference; none where they can only be the server's own user. Raises:
    ValueError: there is no such user, or only root could start processes as that user."""
    name = settings.user
    if os.geteuid() != _ROOT:
        if name not in ("", KEEP_USER) and find_user(name).uid != os.geteuid():
            raise ValueError(f"only a server that runs as root can start workers as user '{name}'")
        return ()
    root = Identity("root", _ROOT, os.getegid(), tuple(os.getgroups()))
    # A model whose files only their owner may read was served to root with its capabilities, and goes on being so.
    as_root = (root, replace(root, keeps_capabilities=True))
    if name in (KEEP_USER, "root", str(_ROOT)):
        return as_root
    if name:
        return (find_user(name),)
    with suppress(ValueError):
        return (find_user(_UNPRIVILEGED), *as_root)
    return as_root


def find_user(text: str) -> Identity:
    """The user of this name or number, with those groups beside the user's own that GPUs belong to; `user:group` for
    another primary group. Raises: ValueError: there is no such user or group."""
    user, _, group = text.partition(":")
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        if not user.isdecimal() or int(user) > _LARGEST_ID:
            raise ValueError(f"there is no user '{user}'") from None
        # Containers run as users that no file knows.
        entry = pwd.struct_passwd((user, "x", int(user), int(user), "", "", ""))
    gid = entry.pw_gid
    if group:
        try:
            gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
            if gid > _LARGEST_ID:
                raise KeyError(group)
        except KeyError:
            raise ValueError(f"there is no group '{group}'") from None
    gpu_groups: set[int] = set()  # render and video on most systems
    for device in _gpu_files():
        with suppress(OSError):
            gpu_groups.add(device.stat().st_gid)
    groups = {gid, *os.getgrouplist(entry.pw_name, gid)} | gpu_groups - {_ROOT}
    return Identity(user, entry.pw_uid, gid, tuple(sorted(groups)), entry.pw_dir)


def gpu_devices() -> tuple[str, ...]:
    """What a worker on a GPU reads and writes, as far as it is there."""
    return tuple(str(device) for device in _gpu_files() if device.name == "kfd" or device.name.startswith("renderD"))


def _gpu_files() -> Iterator[Path]:
    for path in map(Path, _GPU_DEVICES):
        if path.is_dir():
            yield from path.iterdir()
        elif path.exists():
            yield path


# In the zygote


def choose(
    confinement: Confinement, readable: Sequence[str], writable: Sequence[str], program: Sequence[str]
) -> tuple[Identity | None, str]:
    """The first candidate that may do what the model needs, and, in words, who it is where it is not the first of all
    and why not; None = there is none to choose. `readable`: files, and folders with all that is in them, which the
    worker reads. `writable`: folders, to be made where they are not there, and devices. `program`: further files and
    folders that it reads, without their contents. Raises: PermissionError: none of them may."""
    if not confinement.candidates:
        return None, ""
    # Found as root, who sees all files.
    needs = [_need(path, os.R_OK) for path in map(Path, program) if path.exists()]
    for path in map(Path, readable):
        entries = [Path(folder, name) for folder, folders, files in os.walk(path) for name in (*folders, *files)]
        # Links may lead nowhere.
        needs += [_need(entry, os.R_OK) for entry in (path, *entries) if entry.exists()]
    for path in map(Path, writable):
        # The nearest folder that is there, in which it would be made.
        while not path.exists() and path != path.parent:
            path = path.parent
        needs.append(_need(path, os.R_OK | os.W_OK))
    problems: list[str] = []
    for identity in confinement.candidates:
        try:
            with _acting_as(identity):
                lacking = (
                    f"{'write to' if mode & os.W_OK else 'read'} {path}"
                    for path, mode in ([] if identity.keeps_capabilities else needs)
                    if not os.access(path, mode, effective_ids=True)
                )
                problem = next(lacking, "")
        except OSError as error:
            problem = f"be had here ({error.strerror})"
        if not problem:
            return identity, f"{_titled(identity)}: {'; '.join(problems)}" if problems else ""
        problems.append(f"user {_titled(identity)} cannot {problem}")
    raise PermissionError(problems[-1])


def _titled(identity: Identity) -> str:
    if identity.uid != _ROOT:
        return f"'{identity.name}'"
    return "root with its capabilities" if identity.keeps_capabilities else "root"


def _need(path: Path, mode: int) -> tuple[Path, int]:
    """Rights that are needed; a folder that may be read and not entered is as good as none."""
    return path, mode | os.X_OK if path.is_dir() else mode


@contextmanager
def _acting_as(identity: Identity) -> Iterator[None]:
    """Access is decided as for this user meanwhile. For root, in a process with one thread."""
    groups, (effective, permitted) = os.getgroups(), _capabilities()
    try:
        if identity.uid == _ROOT:
            if not identity.keeps_capabilities:
                _set_capabilities(0, permitted)
        else:
            os.setgroups(identity.groups)
            os.setegid(identity.gid)
            os.seteuid(identity.uid)
        yield
    finally:
        if identity.uid == _ROOT:
            _set_capabilities(effective, permitted)
        else:
            os.seteuid(_ROOT)
            os.setegid(os.getgid())
            if set(os.getgroups()) != set(groups):
                os.setgroups(groups)


# In the new process, before any of the model's code


def confine(identity: Identity | None, confinement: Confinement) -> None:
    """Be that user for good, without capabilities and without a way to more rights, within the bounds. Raises: OSError:
    the kernel refuses."""
    if confinement.control_group:
        enter(confinement.control_group)
    if not confinement.core_dumps:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if confinement.largest_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (confinement.largest_file_bytes,) * 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (
        _MOST_OPEN_FILES if each == resource.RLIM_INFINITY else min(each, _MOST_OPEN_FILES) for each in limits
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    keeps = identity is not None and identity.keeps_capabilities
    if not keeps:
        # No program that is started later brings them back. That needs one itself, without which there is nothing to be
        # brought back but for programs of root.
        for number in range(_MOST_CAPABILITIES):
            if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
                break
    if identity is not None and identity.uid != _ROOT:
        os.setgroups(identity.groups)
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
        if os.access(identity.home, os.R_OK | os.X_OK):
            os.environ["HOME"] = identity.home
        os.environ["USER"] = os.environ["LOGNAME"] = identity.name
    if not keeps:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        _set_capabilities(0, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # A change of the user has made /proc/self root's own, where the worker is yet to write its name.
    _prctl(_PR_SET_DUMPABLE, 1)


def hide_memory() -> None:
    """Let no process of the same user look into this one (ptrace, /proc), unless core dumps are wanted."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0))


def _capabilities() -> tuple[int, int]:
    """The effective ones of this process and those that it is permitted, as bits."""
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capget((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), data))
    return data[0] | data[3] << 32, data[1] | data[4] << 32


def _set_capabilities(effective: int, permitted: int) -> None:
    """None can be inherited."""
    low, high = (1 << 32) - 1, 32
    data = (effective & low, permitted & low, 0, effective >> high, permitted >> high, 0)
    _check(_libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(*data)))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
