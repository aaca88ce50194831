"""The server's settings: one frozen dataclass, filled from tritonserver's flags (flags.py)."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from rocserve.core.remote_places import RemotePlace

DEFAULT_MAX_BATCH_SIZE = "default-max-batch-size"
"""--backend-config's setting that says what max_batch_size becomes where a model can batch and nothing is said."""


class ControlMode(enum.Enum):
    """Who says which models are loaded (--model-control-mode)."""

    NONE = "none"
    """All that is in the repository when the server starts."""
    POLL = "poll"
    """All that is in the repository, whenever it changes."""
    EXPLICIT = "explicit"
    """What --load-model and clients name."""


class ReadinessRule(enum.Enum):
    """When the server calls itself ready (--strict-readiness)."""

    STARTED = "false"
    """Once the first loads have ended, whatever came of them."""
    KEPT = "true"
    """Once all that was there at the start serves, and as long as all that has served still does."""
    ALWAYS = "always"
    """While every version that is to be served is: Triton's rule."""


@dataclass(frozen=True, slots=True)
class RestrictedProtocols:
    """Methods that are only for clients that send a header."""

    protocols: tuple[str, ...]
    """Triton's names: health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace,
    logging."""
    header: str
    value: str = ""
    file: Path | None = None
    """Holds the value in place of `value`; it may change while the server runs."""


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


@dataclass(frozen=True, slots=True)
class HttpSettings:
    allow: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    reuse_port: bool = False
    thread_count: int = 8
    """Taken as tritonserver takes it; HTTP is served by the event loop."""
    max_input_size: int = 64 << 20
    """Bytes of a request's body, before and after it is decompressed."""
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    """The certificates are those of gRPC."""
    request_timeout_seconds: float = 0.0
    """The longest that an inference request may take; 0 = as long as it takes."""
    keepalive_seconds: float = 75.0
    """How long a connection may stay without a request."""
    header_forward_pattern: str = ""
    """A regular expression: headers whose names match it become parameters of the request."""
    allow_ui: bool = True
    """Serve the page at /, and what it asks."""
    cors_origins: tuple[str, ...] = ()
    """Of pages whose scripts may ask and read the answers; "*" = of any."""
    restricted: tuple[RestrictedProtocols, ...] = ()


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    allow: bool = True
    address: str = "0.0.0.0"
    port: int = 8001
    reuse_port: bool = False
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    """Of clients that show a certificate, which root_cert vouches for."""
    server_cert: Path | None = None
    server_key: Path | None = None
    root_cert: Path | None = None
    response_compression_level: str = "none"
    """none, low, medium or high."""
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    """0 = connections are not ended for their age."""
    max_connection_age_grace_ms: int = 0
    max_connection_idle_ms: int = 3_600_000
    """0 = connections without calls are not ended."""
    max_message_bytes: int = (1 << 31) - 1
    """Of one message, either way."""
    message_timeout_seconds: float = 60.0
    """From a unary call's beginning until its message is whole; 0 = any time."""
    header_forward_pattern: str = ""
    """As of HTTP."""
    restricted: tuple[RestrictedProtocols, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    allow: bool = True
    address: str = "0.0.0.0"
    port: int = 8002
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    """The certificates are those of gRPC."""
    interval_ms: int = 2000
    """How often the gauges of GPUs and CPUs are read; all else is read when it is asked for."""
    gpu: bool = True
    cpu: bool = True
    config: Mapping[str, str] = field(default_factory=dict)
    """--metrics-config's settings, e.g. {"summary_latencies": "true"}."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """--trace-config: by mode ("" = of all modes), its settings in the order written."""

    values: tuple[tuple[str, str, str], ...] = ()
    """Mode, setting, value; e.g. ("triton", "file", "/tmp/trace.json"), ("", "rate", "100")."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """--cache-config: the response cache."""

    name: str = ""
    """"local"; "" = there is none."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """--rate-limit-resource: how much there is of a resource."""

    name: str
    count: int
    device: int | None = None
    """None = of each device, or of the machine where the resource is global."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: str = "default"
    """default or ISO8601."""
    file: Path | None = None
    """None = standard error."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What engines are told beside a model's own configuration. Plain text and numbers: it travels to workers."""

    cache_directory: str = ""
    """Where compiled programs are kept; "" = `rocserve/` in $XDG_CACHE_HOME or ~/.cache."""
    cache_bytes: int = 20 << 30
    """How much the compiled programs may take; those used least lately go first."""
    migraphx_root: str = ""
    """A folder that holds MIGraphX with the C library that it was built for (`make migraphx-root`); "" = this system's
    own, or $ROCSERVE_MIGRAPHX_ROOT."""


def engine_settings(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """What holds where no flag says otherwise."""
    return EngineSettings(migraphx_root=environment.get("ROCSERVE_MIGRAPHX_ROOT", ""))


KEEP_USER = "same"
"""--worker-user's word for the server's own user."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What models' processes may do."""

    user: str = ""
    """A name or number, with ":group" for another primary group; "" = nobody, where the server is root and the model's
    files allow it."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of the server that are passed on beside those that engines need: model ("" = all), name."""
    core_dumps: bool = False
    memory_bytes: int = 0
    """That one may have with all that it starts; 0 = no bound, as below."""
    tasks: int = 0
    """Processes and threads of one."""
    file_bytes: int = 0
    """The largest file that one may write."""
    control_groups: bool = True
    """Have the kernel keep memory and tasks by cgroups, where the server's own is delegated to it."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds after which a worker is killed; 0 = no limit. A model's parameters may say otherwise, but for drains."""

    request_seconds: float = 0.0
    """Without an answer to a batch."""
    hang_seconds: float = 600.0
    """Without an answer, as what nobody can mean: a worker that hangs."""
    load_seconds: float = 600.0
    """Of loading and warming up, without compiling."""
    drain_seconds: float = 60.0
    """Of a version that is unloaded, until all that it took is answered."""


NO_TIME_LIMITS = TimeLimits(0.0, 0.0, 0.0, 0.0)


_CPUS_OF_ONE_PROCESS = 4
"""Up to so many the server's own process serves clients: the CPUs are needed for what the models do."""
_CPUS_A_FRONT_END = 3
"""One for the front end; the server's scheduling and the workers have the others."""
_MOST_FRONT_ENDS = 16


def default_front_ends(cpus: int) -> int:
    """Processes that serve a protocol where no flag says how many, by the CPUs that may be used."""
    return 0 if cpus <= _CPUS_OF_ONE_PROCESS else min(cpus // _CPUS_A_FRONT_END, _MOST_FRONT_ENDS)


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """Which of the models are loaded. Without a limit all are."""

    max_models: int | None = None
    """Versions that are loaded at once."""
    max_host_bytes: int | None = None
    """What their workers may take of the machine's memory."""
    max_gpu_bytes: int | None = None
    """And of each GPU's."""
    waits: bool = True
    """A request to a model that is not loaded waits until it is, instead of being refused."""
    wait_seconds: float = 60.0
    """How long at most."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_repositories: tuple[Path, ...]
    """Folders; of repositories elsewhere their copies."""
    remote_repositories: tuple[RemotePlace, ...] = ()
    remote_cache_bytes: int | None = None
    """How much the copies of those may take; None = all but a tenth of the disk."""
    what: Path | None = None
    """What was named without a flag, a model or a repository; `model_repositories` is then the folder that it is in, or
    that it is."""
    model_name: str = ""
    """Of the model that `what` names; "" = its own."""
    preprocess: str = ""
    """What images become before that model sees them; "" = as its configuration says."""
    labels: Path | None = None
    """The file with the names of that model's classes; None = its own."""
    control_mode: ControlMode = ControlMode.POLL
    poll_seconds: float = 15.0
    settle_seconds: float = 0.5
    load_models: tuple[str, ...] = ()
    """Models to load at the start in explicit mode; "*" = all."""
    residency: ResidencySettings = ResidencySettings()
    load_thread_count: int = 4
    """How many models load beside each other."""
    strict_model_config: bool = False
    """Nothing is completed from the model file."""
    model_config_name: str = ""
    """Read configs/<name>.pbtxt of a model instead of config.pbtxt."""
    readiness: ReadinessRule = ReadinessRule.KEPT
    exit_on_error: bool = True
    listen_when_loaded: bool = False
    """Clients cannot connect before the first loads have ended."""
    drain_seconds: float = 0.0
    """How long the server goes on serving after it has told that it is going to end: until balancers and clients have
    noticed. 0: nobody balances."""
    exit_timeout_seconds: float = 30.0
    """After that, for the work in hand."""
    max_connection_age_seconds: float = 0.0
    """After which a connection is ended between two calls; 0 = never. For gRPC its own setting goes before."""
    limits: TimeLimits = TimeLimits()
    max_queue_requests: int = 10_000
    max_queue_bytes: int = 4 << 30
    max_requests_per_client: int = 0
    """Inference requests in flight of one address; 0 = any number."""
    max_request_rate_per_client: float = 0.0
    """Inference requests a second of one address; 0 = any number."""
    max_request_memory: int | None = None
    """Bytes of requests that come in, wait and run, and of answers that are not yet read, of the whole server; None =
    by the memory that there is."""
    allow_mixed_tls: bool = False
    """One of gRPC and HTTP may ask clients for certificates while the other does not."""
    front_ends: int | None = None
    """Processes that serve gRPC, and as many that serve HTTP; 0 = the server's own, None = by the CPUs that may be
    used."""
    write_timeout_seconds: float = 60.0
    """An answer that its client has not read by then is given up."""
    max_model_instances: int | None = None
    """Of a model, in all its instance groups; None = 8 a CPU, or 64 a GPU."""
    max_model_versions: int = 128
    """Of a model that its version policy serves at once."""
    max_folder_entries: int = 100_000
    """Files and folders of a model."""
    spin: int | None = None
    """Looks at all that may come, in a row and without anything, before the data plane's thread sleeps; None = by the
    CPUs that there are."""
    server_id: str = "rocserve"
    model_namespacing: bool = False
    """Models of different repositories may have the same name; each name then belongs to its repository."""
    allow_client_shared_memory: bool = False
    admin_addresses: AdminAddresses | None = None
    """None = this machine, and for calls that want a secret header or a client's certificate anywhere."""
    allow_remote_files: bool = False
    """Load requests may bring files (`file:` parameters), in explicit mode."""
    allow_remote_models: bool = False
    """Load requests with files may name models that are in no repository."""
    allow_amd_endpoints: bool | None = None
    """Clients may have files served as endpoints (AMD Inference Server's worker_load); None = in explicit mode."""
    max_amd_endpoints: int = 64
    """Of those at once, counted with each further instance."""
    worker_load_folders: tuple[Path, ...] = ()
    """Folders outside the repositories whose files clients may have served (AMD Inference Server's worker_load)."""
    rate_limit: str = "off"
    """off, or execution_count."""
    rate_limit_resources: tuple[RateLimitResource, ...] = ()
    backend_config: tuple[tuple[str, str, str], ...] = ()
    """Backend ("" = all), setting, value."""
    host_policies: tuple[tuple[str, str, str], ...] = ()
    """Policy, setting, value."""
    engines: EngineSettings = field(default_factory=EngineSettings)
    workers: WorkerSettings = field(default_factory=WorkerSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    log: LogSettings = field(default_factory=LogSettings)
