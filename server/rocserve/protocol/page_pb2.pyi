# Made from page.proto by protos/generate.py with grpcio-tools 1.81.1; do not edit.
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OverviewRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class OverviewResponse(_message.Message):
    __slots__ = ("server", "version", "ready", "now_ms", "models")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    server: str
    version: str
    ready: bool
    now_ms: int
    models: _containers.RepeatedCompositeFieldContainer[ModelOverview]
    def __init__(self, server: _Optional[str] = ..., version: _Optional[str] = ..., ready: _Optional[bool] = ..., now_ms: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelOverview, _Mapping]]] = ...) -> None: ...

class ModelOverview(_message.Message):
    __slots__ = ("name", "version", "state", "reason", "platform", "engine", "devices", "load_seconds", "load_check", "pending_requests", "last_inference_ms", "success_count", "success_ns", "queue_ns", "failure_count", "inference_count", "execution_count", "cache_hit_count", "cache_miss_count", "batches", "latencies_us", "worker_memory_bytes", "worker_restarts", "failures", "lacks_files", "load_warning", "rejected_count", "repository")
    class BatchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_CHECK_FIELD_NUMBER: _ClassVar[int]
    PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_INFERENCE_MS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHE_MISS_COUNT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_US_FIELD_NUMBER: _ClassVar[int]
    WORKER_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LACKS_FILES_FIELD_NUMBER: _ClassVar[int]
    LOAD_WARNING_FIELD_NUMBER: _ClassVar[int]
    REJECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPOSITORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    state: str
    reason: str
    platform: str
    engine: str
    devices: str
    load_seconds: float
    load_check: str
    pending_requests: int
    last_inference_ms: int
    success_count: int
    success_ns: int
    queue_ns: int
    failure_count: int
    inference_count: int
    execution_count: int
    cache_hit_count: int
    cache_miss_count: int
    batches: _containers.ScalarMap[int, int]
    latencies_us: _containers.RepeatedCompositeFieldContainer[Quantile]
    worker_memory_bytes: _containers.RepeatedScalarFieldContainer[int]
    worker_restarts: int
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    lacks_files: bool
    load_warning: str
    rejected_count: int
    repository: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., platform: _Optional[str] = ..., engine: _Optional[str] = ..., devices: _Optional[str] = ..., load_seconds: _Optional[float] = ..., load_check: _Optional[str] = ..., pending_requests: _Optional[int] = ..., last_inference_ms: _Optional[int] = ..., success_count: _Optional[int] = ..., success_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., failure_count: _Optional[int] = ..., inference_count: _Optional[int] = ..., execution_count: _Optional[int] = ..., cache_hit_count: _Optional[int] = ..., cache_miss_count: _Optional[int] = ..., batches: _Optional[_Mapping[int, int]] = ..., latencies_us: _Optional[_Iterable[_Union[Quantile, _Mapping]]] = ..., worker_memory_bytes: _Optional[_Iterable[int]] = ..., worker_restarts: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., lacks_files: _Optional[bool] = ..., load_warning: _Optional[str] = ..., rejected_count: _Optional[int] = ..., repository: _Optional[str] = ...) -> None: ...

class ServerStateRequest(_message.Message):
    __slots__ = ("after_ms",)
    AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    after_ms: int
    def __init__(self, after_ms: _Optional[int] = ...) -> None: ...

class ServerStateResponse(_message.Message):
    __slots__ = ("now_ms", "started_ms", "cpu_use", "memory_used_bytes", "memory_total_bytes", "gpus", "points")
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CPU_USE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    now_ms: int
    started_ms: int
    cpu_use: float
    memory_used_bytes: int
    memory_total_bytes: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuState]
    points: _containers.RepeatedCompositeFieldContainer[ServerPoint]
    def __init__(self, now_ms: _Optional[int] = ..., started_ms: _Optional[int] = ..., cpu_use: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuState, _Mapping]]] = ..., points: _Optional[_Iterable[_Union[ServerPoint, _Mapping]]] = ...) -> None: ...

class GpuState(_message.Message):
    __slots__ = ("use", "memory_used_bytes", "memory_total_bytes")
    USE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    use: float
    memory_used_bytes: int
    memory_total_bytes: int
    def __init__(self, use: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ...) -> None: ...

class ServerPoint(_message.Message):
    __slots__ = ("at_ms", "answered_rate", "failed_rate", "mean_us", "p50_us", "p99_us", "waiting")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_RATE_FIELD_NUMBER: _ClassVar[int]
    FAILED_RATE_FIELD_NUMBER: _ClassVar[int]
    MEAN_US_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    answered_rate: float
    failed_rate: float
    mean_us: float
    p50_us: float
    p99_us: float
    waiting: int
    def __init__(self, at_ms: _Optional[int] = ..., answered_rate: _Optional[float] = ..., failed_rate: _Optional[float] = ..., mean_us: _Optional[float] = ..., p50_us: _Optional[float] = ..., p99_us: _Optional[float] = ..., waiting: _Optional[int] = ...) -> None: ...

class Quantile(_message.Message):
    __slots__ = ("quantile", "value")
    QUANTILE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    quantile: float
    value: float
    def __init__(self, quantile: _Optional[float] = ..., value: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("time_ms", "text")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    text: str
    def __init__(self, time_ms: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class LoadReportRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class LoadReportResponse(_message.Message):
    __slots__ = ("reason", "traceback", "attempts", "failed_ms", "retry_ms", "waits_for_files", "backend", "members", "files", "file_count", "is_served", "config_file", "config_text", "config_is_cut", "config_line", "follows_files", "loads_on_request")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FILES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_SERVED_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FILE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_TEXT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_IS_CUT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_LINE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FILES_FIELD_NUMBER: _ClassVar[int]
    LOADS_ON_REQUEST_FIELD_NUMBER: _ClassVar[int]
    reason: str
    traceback: str
    attempts: int
    failed_ms: int
    retry_ms: int
    waits_for_files: bool
    backend: str
    members: _containers.RepeatedScalarFieldContainer[str]
    files: _containers.RepeatedCompositeFieldContainer[ModelFile]
    file_count: int
    is_served: bool
    config_file: str
    config_text: str
    config_is_cut: bool
    config_line: int
    follows_files: bool
    loads_on_request: bool
    def __init__(self, reason: _Optional[str] = ..., traceback: _Optional[str] = ..., attempts: _Optional[int] = ..., failed_ms: _Optional[int] = ..., retry_ms: _Optional[int] = ..., waits_for_files: _Optional[bool] = ..., backend: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., files: _Optional[_Iterable[_Union[ModelFile, _Mapping]]] = ..., file_count: _Optional[int] = ..., is_served: _Optional[bool] = ..., config_file: _Optional[str] = ..., config_text: _Optional[str] = ..., config_is_cut: _Optional[bool] = ..., config_line: _Optional[int] = ..., follows_files: _Optional[bool] = ..., loads_on_request: _Optional[bool] = ...) -> None: ...

class VersionDetailsRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class VersionDetailsResponse(_message.Message):
    __slots__ = ("config", "config_file", "latencies")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FILE_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    config: _containers.RepeatedCompositeFieldContainer[ConfigLine]
    config_file: str
    latencies: _containers.RepeatedCompositeFieldContainer[LatencyBucket]
    def __init__(self, config: _Optional[_Iterable[_Union[ConfigLine, _Mapping]]] = ..., config_file: _Optional[str] = ..., latencies: _Optional[_Iterable[_Union[LatencyBucket, _Mapping]]] = ...) -> None: ...

class ConfigLine(_message.Message):
    __slots__ = ("mark", "text")
    MARK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    mark: str
    text: str
    def __init__(self, mark: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class LatencyBucket(_message.Message):
    __slots__ = ("up_to_us", "count")
    UP_TO_US_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    up_to_us: int
    count: int
    def __init__(self, up_to_us: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("path", "bytes", "changed_ms", "is_changed")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_MS_FIELD_NUMBER: _ClassVar[int]
    IS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    changed_ms: int
    is_changed: bool
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., changed_ms: _Optional[int] = ..., is_changed: _Optional[bool] = ...) -> None: ...

class EnsembleGraphRequest(_message.Message):
    __slots__ = ("name", "version", "width")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    width: float
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., width: _Optional[float] = ...) -> None: ...

class EnsembleGraphResponse(_message.Message):
    __slots__ = ("width", "height", "boxes", "arrows", "labels")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    ARROWS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    width: float
    height: float
    boxes: _containers.RepeatedCompositeFieldContainer[GraphBox]
    arrows: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.RepeatedCompositeFieldContainer[GraphLabel]
    def __init__(self, width: _Optional[float] = ..., height: _Optional[float] = ..., boxes: _Optional[_Iterable[_Union[GraphBox, _Mapping]]] = ..., arrows: _Optional[_Iterable[str]] = ..., labels: _Optional[_Iterable[_Union[GraphLabel, _Mapping]]] = ...) -> None: ...

class GraphBox(_message.Message):
    __slots__ = ("kind", "x", "y", "width", "height", "text", "title", "model", "version")
    KIND_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    x: float
    y: float
    width: float
    height: float
    text: str
    title: str
    model: str
    version: str
    def __init__(self, kind: _Optional[str] = ..., x: _Optional[float] = ..., y: _Optional[float] = ..., width: _Optional[float] = ..., height: _Optional[float] = ..., text: _Optional[str] = ..., title: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class GraphLabel(_message.Message):
    __slots__ = ("x", "y", "text", "title")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    x: float
    y: float
    text: str
    title: str
    def __init__(self, x: _Optional[float] = ..., y: _Optional[float] = ..., text: _Optional[str] = ..., title: _Optional[str] = ...) -> None: ...

class RepositoryEventsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class RepositoryEventsResponse(_message.Message):
    __slots__ = ("events", "is_last")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RepositoryEvent]
    is_last: bool
    def __init__(self, events: _Optional[_Iterable[_Union[RepositoryEvent, _Mapping]]] = ..., is_last: _Optional[bool] = ...) -> None: ...

class RepositoryEvent(_message.Message):
    __slots__ = ("number", "time_ms", "name", "version", "state", "reason", "lacks_files", "act", "address")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LACKS_FILES_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    number: int
    time_ms: int
    name: str
    version: str
    state: str
    reason: str
    lacks_files: bool
    act: str
    address: str
    def __init__(self, number: _Optional[int] = ..., time_ms: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., lacks_files: _Optional[bool] = ..., act: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class ActsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActsResponse(_message.Message):
    __slots__ = ("token", "is_explicit", "log_verbose_level")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IS_EXPLICIT_FIELD_NUMBER: _ClassVar[int]
    LOG_VERBOSE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    token: str
    is_explicit: bool
    log_verbose_level: int
    def __init__(self, token: _Optional[str] = ..., is_explicit: _Optional[bool] = ..., log_verbose_level: _Optional[int] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("token", "act", "name", "level", "address")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    token: str
    act: str
    name: str
    level: int
    address: str
    def __init__(self, token: _Optional[str] = ..., act: _Optional[str] = ..., name: _Optional[str] = ..., level: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ActResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[WorkerLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[WorkerLine, _Mapping]]] = ...) -> None: ...

class WorkerLine(_message.Message):
    __slots__ = ("time_ms", "level", "text")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    level: str
    text: str
    def __init__(self, time_ms: _Optional[int] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
