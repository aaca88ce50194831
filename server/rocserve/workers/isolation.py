"""Confines worker processes: their environment, user, rights, and bounds that the kernel enforces. The server lists the
users that a worker may run as, preferred first (`candidates`). The zygote, which alone may change users, takes the
first that may do what the model needs (`choose`). The new process becomes that user permanently before any of the
model's code runs (`confine`)."""

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

_ROOT = 0
_LARGEST_ID = (1 << 32) - 2
"""The largest user or group id: the next number means "do not change" (setresuid(2))."""
_MOST_OPEN_FILES = 65_536
"""Bound for one worker: far more than engines and data loaders need, far less than the kernel allows."""

# fmt: off
_PASSED_ON = frozenset(
    {
        # Processes in general.
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LOCPATH", "TZ", "TMPDIR", "TERM", "HOSTNAME",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES",
        # Virtual environments, and the folders in which programs keep their data.
        "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        # Certificates to check others against.
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        # Named one by one, because some variables that begin with NVIDIA_ and ROCSERVE_ are secrets.
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
_CAPABILITY_VERSION = 0x20080522
"""Version 3, with 64 bits for each set (capset(2))."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """A user that workers may run as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = ""
    """"" = the home of the server's environment."""
    keeps_capabilities: bool = False


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a worker is confined by."""

    candidates: tuple[Identity, ...] = ()
    """Preferred first; empty = the zygote's user."""
    core_dumps: bool = False
    largest_file_bytes: int = 0
    """0 = no bound."""
    control_group: str = ""
    """Folder of the worker's cgroup; "" = the zygote's cgroup."""


def worker_environment(
    environment: Mapping[str, str], settings: WorkerSettings, model_name: str = ""
) -> Mapping[str, str]:
    """Return the variables for all workers and the zygote; with a name, the additional ones for the model's workers."""
    passed_on = {name for model, name in settings.environment if model == model_name}
    if not model_name:
        passed_on |= {name for name in environment if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)}
    return {name: value for name, value in environment.items() if name in passed_on}


# Users


def candidates(settings: WorkerSettings) -> tuple[Identity, ...]:
    """Return the users that workers may run as, preferred first; empty = only the server's user. Raises ValueError if
    the user in the settings does not exist, or only root could start workers as that user."""
    name = settings.user
    if os.geteuid() != _ROOT:
        if name not in ("", KEEP_USER) and find_user(name).uid != os.geteuid():
            raise ValueError(f"only a server that runs as root can start workers as user '{name}'")
        return ()
    root = Identity("root", _ROOT, os.getegid(), tuple(os.getgroups()))
    # A server that runs as root has always served models whose files only their owner may read, and must still do so.
    # That needs root's capabilities.
    as_root = (root, replace(root, keeps_capabilities=True))
    if name in (KEEP_USER, "root", str(_ROOT)):
        return as_root
    if name:
        return (find_user(name),)
    with suppress(ValueError):
        return (find_user("nobody"), *as_root)
    return as_root


def find_user(text: str) -> Identity:
    """Find a user by name or number, with the GPUs' groups added; `user:group` sets another primary group. Raises
    ValueError if there is no such user or group."""
    user, _, group = text.partition(":")
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        if not user.isdecimal() or int(user) > _LARGEST_ID:
            raise ValueError(f"there is no user '{user}'") from None
        # In containers, a user need not be in /etc/passwd.
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
    """Return the devices that exist and that a worker on a GPU reads and writes."""
    return tuple(str(device) for device in _gpu_files() if device.name == "kfd" or device.name.startswith("renderD"))


def _gpu_files() -> Iterator[Path]:
    for path in map(Path, ("/dev/kfd", "/dev/dri")):
        if path.is_dir():
            yield from path.iterdir()
        elif path.exists():
            yield path


# In the zygote


def choose(
    confinement: Confinement, readable: Sequence[str], writable: Sequence[str], program: Sequence[str]
) -> tuple[Identity | None, str]:
    """Return the first candidate that may do what the model needs; None = there are no candidates. If it is not the
    preferred candidate, also return a text with its name and the reason. `readable`: files, and folders with all
    contents, to read. `writable`: devices, and folders, which may be missing. `program`: files and folders to read,
    without contents. Raises PermissionError if no candidate may."""
    if not confinement.candidates:
        return None, ""
    # Listed as root, because root sees all files.
    needs = [_need(path, os.R_OK) for path in map(Path, program) if path.exists()]
    for path in map(Path, readable):
        entries = [Path(folder, name) for folder, folders, files in os.walk(path) for name in (*folders, *files)]
        # Links may be broken.
        needs += [_need(entry, os.R_OK) for entry in (path, *entries) if entry.exists()]
    for path in map(Path, writable):
        # The nearest existing folder, in which the path would be made.
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
            problem = f"be used here ({error.strerror})"
        if not problem:
            return identity, f"{_titled(identity)}: {'; '.join(problems)}" if problems else ""
        problems.append(f"user {_titled(identity)} cannot {problem}")
    raise PermissionError(problems[-1])


def _titled(identity: Identity) -> str:
    if identity.uid != _ROOT:
        return f"'{identity.name}'"
    return "root with its capabilities" if identity.keeps_capabilities else "root"


def _need(path: Path, mode: int) -> tuple[Path, int]:
    """Return the access that is needed: reading a folder needs the right to enter it, too."""
    return path, mode | os.X_OK if path.is_dir() else mode


@contextmanager
def _acting_as(identity: Identity) -> Iterator[None]:
    """Make access checks apply to this user inside the block. Only for root, in a process with one thread."""
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
    """Become this user permanently, with no way to more rights, within the bounds. Runs before any of the model's code.
    Raises OSError if the kernel refuses."""
    if confinement.control_group:
        enter(confinement.control_group)
    if not confinement.core_dumps:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if confinement.largest_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (confinement.largest_file_bytes,) * 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (
        _MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else min(limit, _MOST_OPEN_FILES) for limit in limits
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    keeps = identity is not None and identity.keeps_capabilities
    if not keeps:
        # Programs started later cannot regain the capabilities. Dropping them needs a capability; a process without it
        # could regain some only through programs of root.
        for number in range(64):
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
        # 4 is PR_CAP_AMBIENT_CLEAR_ALL.
        _prctl(_PR_CAP_AMBIENT, 4)
        _set_capabilities(0, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # The change of user has made root the owner of /proc/self, but the worker must still write its name there.
    _prctl(_PR_SET_DUMPABLE, 1)


def hide_memory() -> None:
    """Hide this process's memory from others of its user (ptrace, /proc), unless core dumps are wanted."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0))


def _capabilities() -> tuple[int, int]:
    """Return the effective and permitted capabilities, as bits."""
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capget((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), data))
    return data[0] | data[3] << 32, data[1] | data[4] << 32


def _set_capabilities(effective: int, permitted: int) -> None:
    low, high = (1 << 32) - 1, 32
    data = (effective & low, permitted & low, 0, effective >> high, permitted >> high, 0)
    _check(_libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(*data)))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
