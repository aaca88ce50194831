"""The settings of a server: a frozen dataclass with a part for each group of flags."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from itertools import chain
from pathlib import Path

from rocserve.core.load_check import LoadCheckMode
from rocserve.settings.flag import (
    ABSOLUTE_FOLDER,
    AMOUNT,
    BOOLEAN,
    BOUND,
    COUNT,
    LARGEST_INT32,
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    SECONDS_IN_INT32_MS,
    Flag,
    Kind,
    flag,
    number,
    number_or_auto,
    one_of,
    part,
    repeated,
    scoped_setting,
    setting_of,
    text,
)
from rocserve.settings.front_ends import (
    GrpcSettings,
    HttpSettings,
    LogSettings,
    MetricsSettings,
    connection,
    tls,
)
from rocserve.settings.repository import RepositorySettings, ResidencySettings
from rocserve.settings.unix_place import UnixPlace, unix_place

DEFAULT_MAX_BATCH_SIZE = "default-max-batch-size"
"""Setting of --backend-config: the max_batch_size of models that can batch and configure none."""


USER = "uid:"
"""Precedes the number of a client's user, as the client's address."""


@dataclass(frozen=True, slots=True)
class AdminAddresses:
    """Addresses that admin calls may come from (--admin-address); empty = nowhere."""

    anybody: bool = False
    local: bool = False
    """Clients on this machine, through loopback or a Unix socket."""
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    users: tuple[int, ...] = ()
    """Users of clients on a Unix socket."""

    def __str__(self) -> str:
        if self.anybody:
            return "anywhere"
        places = [
            *(["this machine"] if self.local else []),
            *map(str, self.networks),
            *(f"uid:{user}" for user in self.users),
        ]
        return ", ".join(places) or "nowhere"


def admin_addresses(text: str) -> AdminAddresses:
    """`any`, `none`, or a list of `local`, addresses, networks, and users as `uid:NUMBER`."""
    if text in ("any", "none"):
        return AdminAddresses(anybody=text == "any")
    parts = [part.strip() for part in text.split(",")]
    try:
        users = tuple(int(part[len(USER) :]) for part in parts if part.startswith(USER))
        networks = tuple(ipaddress.ip_network(part) for part in parts if part != "local" and not part.startswith(USER))
    except ValueError as error:
        raise ValueError(
            f"expected any, none, or a list of local, addresses, networks and uid:NUMBER, got '{text}': {error}"
        ) from None
    return AdminAddresses(local="local" in parts, networks=networks, users=users)


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """The amount of a resource (--rate-limit-resource)."""

    name: str
    count: int
    device: int | None = None
    """None = each device, or the machine for a global resource."""


def rate_limit_resource(text: str) -> RateLimitResource:
    """Read `name:count` or `name:count:device`."""
    name, *numbers = text.split(":")
    if not name or len(numbers) not in (1, 2) or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, got '{text}'")
    return RateLimitResource(name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def backend_setting(text: str) -> tuple[str, str, str]:
    """Read as `scoped_setting` does; `,name=value` also means all backends."""
    backend, name, value = scoped_setting(text)
    if name == DEFAULT_MAX_BATCH_SIZE and not value.isdecimal():
        raise ValueError(f"expected a whole number for {name}, got '{value}'")
    return backend, name, value


def worker_variables(text: str) -> tuple[tuple[str, str], ...]:
    """Read `name,name` for all models, or `model:name,name` for one, as pairs of model ("" = all) and name."""
    model, separator, names = text.rpartition(":")
    pairs = tuple((model, name) for name in names.split(","))
    if (separator and not model) or not all(name and "=" not in name for _, name in pairs):
        raise ValueError(f"expected [MODEL:]NAME[,NAME...], got '{text}'")
    return pairs


_OLDER_CACHE_FLAG = "response-cache-byte-size"
"""tritonserver's flag from before --cache-config."""


def cache_bytes(values: Sequence[tuple[str, str, str]]) -> int:
    """`values`: cache, setting and value; the cache is _OLDER_CACHE_FLAG if that flag has set it."""
    if len({name == _OLDER_CACHE_FLAG for name, _, _ in values}) > 1:
        raise ValueError(
            f"Incompatible flags --{_OLDER_CACHE_FLAG} and --cache-config both provided. Please provide one or the"
            " other."
        )
    for name, setting, value in values:
        if name not in ("local", _OLDER_CACHE_FLAG):
            raise ValueError(
                f"--cache-config={name},{setting}={value}: there is only the cache 'local'; write local,size=BYTES"
            )
        if setting != "size" or not value.isdecimal():
            raise ValueError(f"--cache-config=local,{setting}={value}: expected local,size=BYTES")
    return int(values[-1][2])


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The server's settings of engines. Plain text and numbers only, because these settings are sent to workers."""

    cache_directory: str = flag(
        "",
        ABSOLUTE_FOLDER,
        "folder of compiled programs and of copies of remote repositories; servers may share it (default rocserve/"
        " in $XDG_CACHE_HOME or ~/.cache)",
    )
    cache_bytes: int = flag(
        20 << 30, POSITIVE, "bytes for compiled programs; the least recently used go first", name="cache-size-bytes"
    )
    migraphx_root: str = flag(
        "",
        ABSOLUTE_FOLDER,
        "folder with MIGraphX and its C library (default $ROCSERVE_MIGRAPHX_ROOT, else this system's MIGraphX)",
    )
    load_check: str = flag(
        "on",
        one_of(mode.value for mode in LoadCheckMode),
        "check each version before it serves (docs/reference/load-check.md); warn: an engine that computes other"
        " numbers than the reference only causes a warning; strict: refuse to batch rows that depend on each other",
    )
    load_check_seconds: float = flag(
        10.0, POSITIVE_SECONDS, "how long the check of a version may take", name="load-check-seconds"
    )


def engine_settings() -> EngineSettings:
    """Return the defaults, which depend on the environment."""
    return EngineSettings(migraphx_root=os.environ.get("ROCSERVE_MIGRAPHX_ROOT", ""))


KEEP_USER = "same"
"""Value of --worker-user for the server's own user."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Limits and rights of worker processes."""

    user: str = flag(
        "",
        text("USER[:GROUP]"),
        "user of the models' processes; same = the server's user (default: nobody if the server is root and the"
        " model's files allow it, else the server's user)",
    )
    environment: tuple[tuple[str, str], ...] = repeated(
        Kind("[MODEL:]NAME[,NAME...]", worker_variables),
        "environment variables that models get in addition to the engines' variables",
        make=lambda values: tuple(chain(*values)),
    )
    """Model ("" = all) and name of each variable."""
    memory_bytes: int = flag(0, BOUND, "memory of a model's process and its children; 0 = no limit")
    tasks: int = flag(0, BOUND, "processes and threads of a model's process, itself included; 0 = no limit")
    file_bytes: int = flag(0, BOUND, "largest file of a model's process, its outputs' memory included; 0 = no limit")
    shared_workers: int = flag(
        0,
        AMOUNT,
        "processes that small models share (docs/guides/many-models.md); 0 = each model has a separate process",
        name="shared-workers",
    )
    control_groups: bool = flag(
        True,
        BOOLEAN,
        "limit models' memory and tasks through cgroups if the server's cgroup is delegated to it; else the server"
        " checks the processes",
        name="worker-cgroups",
    )
    core_dumps: bool = flag(False, BOOLEAN, "let crashing models write core dumps, within the system's limits")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds after which a worker is killed; 0 = no limit. A model's parameters may override all but the drain."""

    request_timeout_seconds: float = flag(
        0.0, SECONDS, "how long a model may take for a batch before its worker is killed and restarted; 0 = no limit"
    )
    hang_timeout_seconds: float = flag(
        600.0, SECONDS, "how long a worker may run a batch without progress before it is killed as hung; 0 = no limit"
    )
    drain_timeout_seconds: float = flag(
        60.0,
        SECONDS,
        "how long an unloaded or replaced version may finish its requests before its workers are killed; 0 = no limit",
    )
    load_timeout_seconds: float = flag(600.0, SECONDS, "how long a load may take, without compiling; 0 = no limit")


NO_TIME_LIMITS = TimeLimits(0.0, 0.0, 0.0, 0.0)


def default_front_ends(cpus: int) -> int:
    """Return how many processes serve clients by default while the server's process is busy."""
    # With at most four CPUs the server's own process serves clients, because the models need the CPUs. Else a front end
    # has two: one for itself, one for scheduling and workers. On 16 CPUs 8 front ends answer 13 % more small requests
    # than 5 (benchmarks/results/front_ends.md), because the server's single thread then receives more messages per
    # turn.
    return 0 if cpus <= 4 else min(cpus // 2, 16)


def _older_trace_flag(name: str, mode: str, setting: str) -> Flag:
    """Declare one of tritonserver's flags from before --trace-config."""
    kind = Kind("VALUE", lambda text: (mode, setting, text))
    scope = f"{mode}," if mode else ""
    return Flag(kind, f"the same as --trace-config={scope}{setting}=VALUE", name, repeatable=True)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of a server."""

    repository: RepositorySettings = part(RepositorySettings, "model repository")
    residency: ResidencySettings = part(ResidencySettings, "model repository")
    what: Path | None = None
    """The model or repository that the command line names without a flag. The only root is this folder, or the file's
    folder. None = a URL, or --model-repository."""
    server_id: str = flag("rocserve", text("NAME"), "the server's name in its metadata", name="id")
    # 100,000 polls take some 0.3 s in which a CPU does nothing else.
    spin: int | None = flag(
        None,
        number("N", 0, most=100_000),
        "polls of the request thread, some 3 us each, before it sleeps; 0 = workers do not poll either (default 0 with"
        " one CPU, 22 with less than four, else 100)",
    )
    exit_on_error: bool = flag(True, BOOLEAN, "exit if a model fails to load at the start")
    listen_when_loaded: bool = flag(
        False, BOOLEAN, "open the ports after the first loads, for load balancers that ignore readiness"
    )
    drain_seconds: float = flag(
        0.0,
        SECONDS,
        "how long the server serves without being ready before it exits, so that clients leave",
        name="drain-seconds",
    )
    exit_timeout_seconds: float = flag(30.0, SECONDS, "how long the exit waits for requests, after --drain-seconds")
    max_queue_requests: int = flag(10_000, POSITIVE, "requests that may wait for one version")
    max_queue_bytes: int = flag(4 << 30, POSITIVE, "bytes of inputs that may wait for one version")
    max_requests_per_client: int = flag(0, COUNT, "inference requests in flight per client address; 0 = no limit")
    max_request_rate_per_client: float = flag(
        0.0, number("NUMBER", 0, float, LARGEST_INT32), "inference requests per second and client address; 0 = no limit"
    )
    max_request_memory: int | None = flag(
        None,
        POSITIVE,
        "bytes of all requests that arrive, wait or run, and of unread responses (default a quarter of the"
        " container's or the machine's memory, at most 8589934592)",
    )
    front_ends: int | None = flag(
        None,
        number_or_auto("auto|N", 0, 64),  # The bound is against typos.
        "processes that serve clients, over gRPC and HTTP; 0 = the server's process serves them; auto (default) ="
        " that process until it is busy, then one per 2 CPUs, at most 16; with up to 4 CPUs always that process",
    )
    write_timeout_seconds: float = flag(
        60.0, POSITIVE_SECONDS, "how long a client may stop reading before its response is dropped"
    )
    admin_addresses: AdminAddresses | None = flag(
        None,
        Kind("LIST", admin_addresses),
        "clients that may make admin calls (loads, log and trace settings, shared memory): any, none, or a list of"
        " addresses, networks and users of a Unix socket, local,10.0.0.0/8,uid:1000 (default local; any for calls that"
        " require a secret header or a client's certificate)",
        name="admin-address",
    )
    allow_client_shm: bool = flag(False, BOOLEAN, "let clients on this machine pass tensors in shared memory")
    rate_limit: str = flag(
        "off",
        one_of(("off", "execution_count")),
        "execution_count: instances run by priority and resources; off: whenever they are free",
    )
    rate_limit_resources: tuple[RateLimitResource, ...] = repeated(
        Kind("NAME:COUNT[:DEVICE]", rate_limit_resource),
        "amount of a resource that instances hold",
        name="rate-limit-resource",
    )
    response_cache_bytes: int | None = flag(
        None,
        setting_of("local,size=BYTES", "local,SETTING=VALUE"),
        "the response cache, e.g. local,size=104857600; repeatable",
        repeatable=True,
        others=(
            Flag(
                Kind("N", lambda text: (_OLDER_CACHE_FLAG, "size", str(AMOUNT.read(text)))),
                "the same as --cache-config=local,size=N",
                _OLDER_CACHE_FLAG,
                repeatable=True,
            ),
        ),
        make=cache_bytes,
        name="cache-config",
    )
    backend_config: tuple[tuple[str, str, str], ...] = repeated(
        Kind("[BACKEND,]SETTING=VALUE", backend_setting),
        "a setting of one backend, or of all: onnxruntime,default-max-batch-size=8",
    )
    host_policies: tuple[tuple[str, str, str], ...] = repeated(
        setting_of("POLICY,SETTING=VALUE"),
        "cores of the instances of a host policy: gpu_0,numa-node=0 or gpu_0,cpu-cores=0-3",
        name="host-policy",
    )
    limits: TimeLimits = part(TimeLimits, "server")
    engines: EngineSettings = part(engine_settings, "engines")
    workers: WorkerSettings = part(WorkerSettings, "workers", "worker-")
    http: HttpSettings = part(HttpSettings, "HTTP", "http-")
    grpc: GrpcSettings = part(GrpcSettings, "gRPC", "grpc-")
    metrics: MetricsSettings = part(MetricsSettings, "metrics", "metrics-")
    trace: tuple[tuple[str, str, str], ...] = repeated(
        Kind("[MODE,]SETTING=VALUE", scoped_setting),
        "how requests are traced: mode, level, rate, count, and the mode's own settings:"
        " triton,file=trace.json or opentelemetry,url=http://localhost:4318/v1/traces",
        others=(
            _older_trace_flag("trace-file", "triton", "file"),
            _older_trace_flag("trace-level", "", "level"),
            _older_trace_flag("trace-rate", "", "rate"),
            _older_trace_flag("trace-count", "", "count"),
            _older_trace_flag("trace-log-frequency", "triton", "log-frequency"),
        ),
        name="trace-config",
        group="traces",
    )
    """Mode ("" = all modes), setting and value, in the order of the command line."""
    log: LogSettings = part(LogSettings, "log", "log-")
    allow_mixed_tls: bool = tls(
        False,
        BOOLEAN,
        "let only one of gRPC and HTTP require client certificates if other machines reach both",
    )
    max_connection_age_seconds: float = connection(
        0.0,
        SECONDS_IN_INT32_MS,
        "age at which a connection is closed after its calls, so that its client finds new servers; 0 = never",
    )

    @property
    def unix_sockets(self) -> tuple[UnixPlace, ...]:
        """Return the Unix sockets that clients connect to."""
        places = (unix_place(part.address) for part in (self.grpc, self.http) if part.allow)
        return tuple(place for place in places if place is not None)

    @property
    def tells_users_apart(self) -> bool:
        """Return whether the user of a client on a Unix socket matters."""
        names_users = self.admin_addresses is not None and bool(self.admin_addresses.users)
        return bool(names_users or self.max_requests_per_client or self.max_request_rate_per_client)
