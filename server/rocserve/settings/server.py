"""The settings of a server: one frozen dataclass, whose parts are the groups of its flags."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from itertools import chain
from pathlib import Path

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
    Kind,
    flag,
    number,
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
    TraceSettings,
    connection,
    tls,
)
from rocserve.settings.repository import RepositorySettings, ResidencySettings

DEFAULT_MAX_BATCH_SIZE = "default-max-batch-size"
"""--backend-config's setting that says what max_batch_size becomes where a model can batch and nothing is said."""
_MOST_SPIN = 100_000
"""Looks; some 0.3 s, in which a CPU does nothing else."""
_MOST_FRONT_ENDS_ASKED = 64
"""Processes of a protocol that --front-ends may ask for: more is a slip."""


@dataclass(frozen=True, slots=True)
class AdminAddresses:
    """Where admin calls may come from (--admin-address); nowhere, if nothing is said."""

    anybody: bool = False
    local: bool = False
    """Clients on this machine, by its loopback or by a socket."""
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def __str__(self) -> str:
        if self.anybody:
            return "anywhere"
        places = [*(["this machine"] if self.local else []), *map(str, self.networks)]
        return ", ".join(places) or "nowhere"


def admin_addresses(text: str) -> AdminAddresses:
    """`any`, `none`, or a list of `local`, addresses and networks."""
    if text in ("any", "none"):
        return AdminAddresses(anybody=text == "any")
    parts = [part.strip() for part in text.split(",")]
    try:
        networks = tuple(ipaddress.ip_network(part) for part in parts if part != "local")
    except ValueError as error:
        raise ValueError(
            f"expected any, none, or a list of local, addresses and networks, got '{text}': {error}"
        ) from None
    return AdminAddresses(local="local" in parts, networks=networks)


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """--rate-limit-resource: how much there is of a resource."""

    name: str
    count: int
    device: int | None = None
    """None = of each device, or of the machine where the resource is global."""


def rate_limit_resource(text: str) -> RateLimitResource:
    """`name:count` or `name:count:device`."""
    name, *numbers = text.split(":")
    if not name or len(numbers) not in (1, 2) or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, got '{text}'")
    return RateLimitResource(name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def backend_setting(text: str) -> tuple[str, str, str]:
    """As `scoped_setting`; `,name=value` is for all backends too."""
    backend, name, value = scoped_setting(text)
    if name == DEFAULT_MAX_BATCH_SIZE and not value.isdecimal():
        raise ValueError(f"expected a number for {name}, got '{value}'")
    return backend, name, value


def worker_variables(text: str) -> tuple[tuple[str, str], ...]:
    """`name,name` for all models, or `model:name,name` for one; as pairs of model ("" = all) and name."""
    model, separator, names = text.rpartition(":")
    pairs = tuple((model, name) for name in names.split(","))
    if (separator and not model) or not all(name and "=" not in name for _, name in pairs):
        raise ValueError(f"expected [MODEL:]NAME[,NAME...], got '{text}'")
    return pairs


def cache_bytes(values: Sequence[tuple[str, str, str]]) -> int:
    for name, setting, value in values:
        if name != "local":
            raise ValueError(
                f"--cache-config={name},{setting}={value}: there is only the cache 'local'; write local,size=BYTES"
            )
        if setting != "size" or not value.isdecimal():
            raise ValueError(f"--cache-config=local,{setting}={value}: expected local,size=BYTES")
    return int(values[-1][2])


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of engines, beside a model's own configuration. Plain text and numbers: it travels to workers."""

    cache_directory: str = flag(
        "",
        ABSOLUTE_FOLDER,
        "where programs that MIGraphX has compiled, and copies of repositories elsewhere, are kept; several servers"
        " may share it (default rocserve/ in $XDG_CACHE_HOME or ~/.cache)",
    )
    cache_bytes: int = flag(
        20 << 30, POSITIVE, "how much the programs may take; those used least lately go first", name="cache-size-bytes"
    )
    migraphx_root: str = flag(
        "",
        ABSOLUTE_FOLDER,
        "a folder that holds MIGraphX together with the C library that it was built for (default"
        " $ROCSERVE_MIGRAPHX_ROOT, else this system's MIGraphX)",
    )


def engine_settings() -> EngineSettings:
    """What holds where no flag says otherwise."""
    return EngineSettings(migraphx_root=os.environ.get("ROCSERVE_MIGRAPHX_ROOT", ""))


KEEP_USER = "same"
"""--worker-user's word for the server's own user."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What models' processes may do."""

    user: str = flag(
        "",
        text("USER[:GROUP]"),
        "whom models' processes run as; same: the server's own user (default: nobody where the server is root and the"
        " model's files allow it, else the server's own)",
    )
    environment: tuple[tuple[str, str], ...] = repeated(
        Kind("[MODEL:]NAME[,NAME...]", worker_variables),
        "variables of the server's environment that models get beside those that engines need",
        make=lambda values: tuple(chain(*values)),
    )
    """Model ("" = all), name."""
    memory_bytes: int = flag(0, BOUND, "memory that a model's process may have, with all that it starts; 0: any")
    tasks: int = flag(0, BOUND, "processes and threads that a model's process may have, itself included; 0: any")
    file_bytes: int = flag(
        0, BOUND, "the largest file that a model's process may write, its outputs' memory included; 0: any"
    )
    shared_workers: int = flag(
        0,
        AMOUNT,
        "how many processes the small models that may share one have together (docs/guides/many-models.md); 0: each"
        " has its own",
        name="shared-workers",
    )
    control_groups: bool = flag(
        True,
        BOOLEAN,
        "have the kernel keep models' memory and tasks by cgroups, where the server's own is delegated to it; else"
        " the server checks their processes",
        name="worker-cgroups",
    )
    core_dumps: bool = flag(False, BOOLEAN, "let crashing models leave core dumps, as far as the system's limits do")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds after which a worker is killed; 0 = no limit. A model's parameters may say otherwise, but for drains."""

    request_timeout_seconds: float = flag(
        0.0,
        SECONDS,
        "how long a model may take to answer a batch; then its worker is killed and started again; 0 = no limit",
    )
    hang_timeout_seconds: float = flag(
        600.0,
        SECONDS,
        "how long a worker may make no progress with a batch in flight until it counts as hung and is killed; 0 = no"
        " limit",
    )
    drain_timeout_seconds: float = flag(
        60.0,
        SECONDS,
        "how long a version that is unloaded or replaced may take to answer what it took; then its workers are"
        " killed; 0 = no limit",
    )
    load_timeout_seconds: float = flag(
        600.0, SECONDS, "how long a model may take to load, compiling not counted; 0 = no limit"
    )


NO_TIME_LIMITS = TimeLimits(0.0, 0.0, 0.0, 0.0)


_CPUS_OF_ONE_PROCESS = 4
"""Up to this number the server's own process serves clients: the CPUs are needed for what the models do."""
_CPUS_A_FRONT_END = 2
"""One for the front end; the server's scheduling and the workers have the others. On 16 CPUs 8 answer 13 % more small
requests than 5 (benchmarks/results/front_ends.md), for what comes to the server's one thread is more at once."""
_MOST_FRONT_ENDS = 16


def default_front_ends(cpus: int) -> int:
    """Processes that serve a protocol where no flag says how many, by the CPUs that may be used."""
    return 0 if cpus <= _CPUS_OF_ONE_PROCESS else min(cpus // _CPUS_A_FRONT_END, _MOST_FRONT_ENDS)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    repository: RepositorySettings = part(RepositorySettings, "model repository")
    residency: ResidencySettings = part(ResidencySettings, "model repository")
    what: Path | None = None
    """What was named without a flag, a model or a repository; the one root is then the folder that it is in, or that it
    is."""
    server_id: str = flag("rocserve", text("NAME"), "the server's name in its metadata", name="id")
    spin: int | None = flag(
        None,
        number("N", 0, most=_MOST_SPIN),
        "looks for what comes, each some 3 us, before the thread of requests and answers sleeps; 0 = it sleeps at"
        " once (default 0 with one CPU, 22 with less than four, else 100)",
    )
    exit_on_error: bool = flag(True, BOOLEAN, "end when a model fails to load at the start")
    listen_when_loaded: bool = flag(
        False,
        BOOLEAN,
        "open the ports of gRPC and HTTP when the models that are there have loaded, for balancers that do not look"
        " at readiness",
    )
    drain_seconds: float = flag(
        0.0,
        SECONDS,
        "how long the server serves on, not ready, before its end, while balancers and clients go away",
        name="drain-seconds",
    )
    exit_timeout_seconds: float = flag(
        30.0, SECONDS, "how long the end, after --drain-seconds, waits for work in flight"
    )
    max_queue_requests: int = flag(10_000, POSITIVE, "requests that may wait for a version")
    max_queue_bytes: int = flag(4 << 30, POSITIVE, "bytes of inputs that may wait for a version")
    max_requests_per_client: int = flag(
        0, COUNT, "inference requests in flight of one client, which is an address; 0 = any number"
    )
    max_request_rate_per_client: float = flag(
        0.0, number("NUMBER", 0, float, LARGEST_INT32), "inference requests a second of one client; 0 = any number"
    )
    max_request_memory: int | None = flag(
        None,
        POSITIVE,
        "bytes of all requests that come in, wait and run, and of answers that are not yet read (default a quarter of"
        " the container's or the machine's memory, at most 8589934592)",
    )
    front_ends: int | None = flag(
        None,
        number("N", 0, most=_MOST_FRONT_ENDS_ASKED),
        "processes that serve gRPC, and as many that serve HTTP; 0 = the server itself does (default 0 with up to 4"
        " CPUs, else one for 2 of them, at most 16)",
    )
    write_timeout_seconds: float = flag(
        60.0, POSITIVE_SECONDS, "how long a client may not read what it is sent before the answer is given up"
    )
    admin_addresses: AdminAddresses | None = flag(
        None,
        Kind("LIST", admin_addresses),
        "where admin calls (loads, settings of log and traces, registration of shared memory) may come from: any,"
        " none, or a list of local, addresses and networks such as local,10.0.0.0/8 (default local; any for calls"
        " that want a secret header or a client's certificate)",
        name="admin-address",
    )
    allow_client_shm: bool = flag(False, BOOLEAN, "let clients on this machine hand over tensors in shared memory")
    rate_limit: str = flag(
        "off",
        one_of(("off", "execution_count")),
        "execution_count: instances run by their priority and the resources that they hold; off: as they are free",
    )
    rate_limit_resources: tuple[RateLimitResource, ...] = repeated(
        Kind("NAME:COUNT[:DEVICE]", rate_limit_resource),
        "how much there is of a resource that instances hold",
        name="rate-limit-resource",
    )
    response_cache_bytes: int | None = flag(
        None,
        setting_of("local,size=BYTES", "local,SETTING=VALUE"),
        "the response cache, e.g. local,size=104857600; repeatable",
        repeatable=True,
        make=cache_bytes,
        name="cache-config",
    )
    backend_config: tuple[tuple[str, str, str], ...] = repeated(
        Kind("[BACKEND,]SETTING=VALUE", backend_setting),
        "a setting of one backend, or of all: onnxruntime,default-max-batch-size=8",
    )
    host_policies: tuple[tuple[str, str, str], ...] = repeated(
        setting_of("POLICY,SETTING=VALUE"),
        "where the instances of a host policy run: gpu_0,numa-node=0 or gpu_0,cpu-cores=0-3",
        name="host-policy",
    )
    limits: TimeLimits = part(TimeLimits, "server")
    engines: EngineSettings = part(engine_settings, "engines")
    workers: WorkerSettings = part(WorkerSettings, "workers", "worker-")
    http: HttpSettings = part(HttpSettings, "HTTP", "http-")
    grpc: GrpcSettings = part(GrpcSettings, "gRPC", "grpc-")
    metrics: MetricsSettings = part(MetricsSettings, "metrics", "metrics-")
    trace: TraceSettings = part(TraceSettings, "traces")
    log: LogSettings = part(LogSettings, "log", "log-")
    allow_mixed_tls: bool = tls(
        False,
        BOOLEAN,
        "let one of gRPC and HTTP ask clients for certificates while the other, reachable from elsewhere, does not",
    )
    max_connection_age_seconds: float = connection(
        0.0,
        SECONDS_IN_INT32_MS,
        "age at which a connection, of gRPC or HTTP, is ended after the calls in flight, for its client to find new"
        " servers; 0 = never",
    )
