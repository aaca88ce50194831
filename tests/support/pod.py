"""Runs a container of a manifest with an OCI runtime (crun) as Kubernetes would: with its user, without capabilities,
with a read-only root, the seccomp profile of container engines, and the manifest's emptyDirs. Instead of an image it
sees this machine's files, and it uses this machine's network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
import pytest

from benchmarks.server_process import free_port
from support.migraphx import CHECKOUT
from support.processes import has_ended, name_of
from support.waiting import PATIENCE_SECONDS, wait_until

SERVING = b"\x08\x01"
"""A HealthCheckResponse with status = SERVING."""
SECCOMP = Path("/usr/share/containers/seccomp.json")
# crun 1.8 requires that all control groups are of one version.
START = """
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 none /sys/fs/cgroup
exec crun --cgroup-manager=disabled --root="$1/state" run --bundle="$1" pod
"""


def require_containers() -> None:
    """Skip the test if no container can be run."""
    has_tools = shutil.which("crun") and SECCOMP.exists()
    if not has_tools or os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no containers here: they need root that may make mounts, and crun, which comes with buildah")


class Pod:
    """A context manager: the one container of a pod. Its server listens on free ports of this machine."""

    def __init__(self, spec: Mapping[str, Any], models: Path, models_at: str, folder: Path, *flags: str) -> None:
        """`spec`: the pod's specification; `models`: the folder mounted at `models_at`; `folder`: for the pod's files;
        `flags`: of the server, after the manifest's."""
        (self._container,) = spec["containers"]
        self._volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        self._security = {**spec.get("securityContext", {}), **self._container["securityContext"]}
        self._models = (models, models_at)
        self._folder = folder
        self._flags = flags
        self._crun = ("crun", f"--root={folder}/state")
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        (self._folder / "root").mkdir()
        for name in ("bin", "lib", "lib64", "sbin"):
            (self._folder / "root" / name).symlink_to(f"usr/{name}")
        (self._folder / "config.json").write_text(json.dumps(self._configuration()))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "bash", "-euc", START, "pod", str(self._folder)], stdout=log, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        # The container may have ended, or never started.
        subprocess.run([*self._crun, "kill", "pod", "KILL"], check=False, stderr=subprocess.DEVNULL)
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def signal(self, name: str) -> None:
        subprocess.run([*self._crun, "kill", "pod", name], check=True)

    def wait(self, seconds: float) -> int:
        """Wait for the container's exit status."""
        assert self._process is not None
        return self._process.wait(seconds)

    def answers(self, probe: str) -> bool:
        """Run the manifest's probe of this name; return its answer."""
        how = self._container[probe]
        if "grpc" in how:
            with grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}") as channel:
                try:
                    answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE_SECONDS)
                except grpc.RpcError:
                    return False
                return bool(answer == SERVING)
        try:
            url = f"http://127.0.0.1:{self.ports['http']}{how['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def workers(self, model: str) -> list[psutil.Process]:
        """The live workers of a model."""
        assert self._process is not None
        return [
            process
            for process in psutil.Process(self._process.pid).children(recursive=True)
            if name_of(process).startswith(f"rocserve:{model}") and not has_ended(process.pid)
        ]

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            return self.answers("readinessProbe")

        wait_until(is_ready, f"readiness; the log is in {self._folder}")

    def _configuration(self) -> dict[str, Any]:
        """The container's config.json of OCI."""
        nobody_may = {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")}
        assert self._security["capabilities"] == {"drop": ["ALL"]}
        assert self._security["seccompProfile"] == {"type": "RuntimeDefault"}
        environment = {entry["name"]: entry["value"] for entry in self._container.get("env", [])}
        environment |= {
            "HOME": "/home/rocserve",
            "PATH": f"{CHECKOUT}/.venv/bin:/usr/bin",
            "PYTHONPATH": f"{CHECKOUT}/server:{CHECKOUT}/clients",
        }
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        user = self._security["runAsUser"]
        return {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": user, "gid": self._security.get("runAsGroup", user)},
                "args": [*self._container["command"], *self._container["args"], *ports, *self._flags],
                "env": [f"{name}={value}" for name, value in environment.items()],
                "cwd": "/",
                "capabilities": nobody_may,
                "noNewPrivileges": not self._security["allowPrivilegeEscalation"],
            },
            "root": {"path": str(self._folder / "root"), "readonly": self._security["readOnlyRootFilesystem"]},
            "mounts": [*self._mounts()],
            "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}], "seccomp": _seccomp()},
        }

    def _mounts(self) -> list[dict[str, Any]]:
        models, models_at = self._models
        image = [Path("/usr"), Path("/etc"), Path(sys.base_prefix), CHECKOUT, Path(sys.prefix).resolve()]
        return [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            *(
                _tmpfs(mount["mountPath"], "mode=777,nosuid,nodev")
                for mount in self._container.get("volumeMounts", [])
                if "emptyDir" in self._volumes[mount["name"]]
            ),
            *(_bind(path, str(path)) for path in image),
            _bind(models, models_at),
        ]


def _tmpfs(destination: str, options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": options.split(",")}


def _bind(source: Path, destination: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", "ro"]}


def _seccomp() -> dict[str, Any]:
    """The profile of container engines, for a process without capabilities on x86-64."""
    profile = json.loads(SECCOMP.read_text())
    allowed = [
        {key: rule[key] for key in ("names", "action", "args", "errnoRet") if rule.get(key)}
        for rule in profile["syscalls"]
        if not rule.get("includes", {}).get("caps") and "amd64" in rule.get("includes", {}).get("arches", ["amd64"])
    ]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": allowed,
    }
