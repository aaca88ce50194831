"""Flags of the repository, the server as a whole and its engines."""

from __future__ import annotations

from pathlib import Path

from rocserve.flags.flag import Flag
from rocserve.flags.values import (
    COUNT,
    POSITIVE,
    POSITIVE_SECONDS,
    RATE,
    SECONDS,
    admin_addresses,
    at_least,
    backend_setting,
    boolean,
    byte_size,
    folder,
    rate_limit_resource,
    readiness_rule,
    repository,
    setting_of,
    worker_variables,
)
from rocserve.presets import NAMES
from rocserve.settings import ControlMode

MOST_SPIN = 100_000
"""Looks; some 0.3 s, in which a CPU does nothing else."""

REPOSITORY = (
    Flag(
        "model-repository",
        "model_repositories",
        repository,
        "a folder of models, or s3://, gs://, as://, hf://, https:// (docs/guides/remote-repositories.md); repeatable",
        repeatable=True,
        aliases=("model-store",),
        value="DIR|URL",
    ),
    Flag(
        "model-name",
        "model_name",
        str,
        "what the model that WHAT names is called (default: MODEL_NAME of the environment, else what its configuration"
        " says, else its file's name)",
        value="NAME",
    ),
    Flag(
        "preprocess",
        "preprocess",
        str,
        "make NAME_image beside the model that WHAT names: JPEGs and PNGs in, labels or boxes out"
        " (docs/guides/image-models.md)",
        choices=NAMES,
    ),
    Flag(
        "labels",
        "labels",
        Path,
        "the names of that model's classes, a line each (default: labels.txt beside the model)",
        value="FILE",
    ),
    Flag(
        "model-control-mode",
        "control_mode",
        str,
        "poll: follow the folder; none: load all that is there at the start; explicit: load what --load-model and"
        " clients name (default poll)",
        choices=tuple(mode.value for mode in ControlMode),
    ),
    Flag(
        "load-model",
        "load_models",
        str,
        "load this at the start in explicit mode; * = all; repeatable",
        repeatable=True,
        value="MODEL",
    ),
    Flag(
        "repository-settle-secs",
        "settle_seconds",
        SECONDS,
        "how long a model's files must stay unchanged before a change counts (default 0.5)",
    ),
    Flag(
        "repository-poll-secs",
        "poll_seconds",
        SECONDS,
        "how often to scan even if nothing tells of a change (default 15)",
    ),
    Flag(
        "remote-cache-size-bytes",
        "remote_cache_bytes",
        POSITIVE,
        "how much the copies of repositories elsewhere may take in --cache-directory (default: all but a tenth of its"
        " disk)",
    ),
    Flag(
        "max-loaded-models",
        "residency.max_models",
        POSITIVE,
        "model versions that are loaded at once; all are registered, and loaded when they are asked for"
        " (docs/guides/many-models.md; default: all)",
    ),
    Flag(
        "max-model-memory",
        "residency.max_host_bytes",
        byte_size,
        "memory that the workers of loaded models may take, likewise (default: any)",
    ),
    Flag(
        "max-model-gpu-memory",
        "residency.max_gpu_bytes",
        byte_size,
        "memory of each GPU that loaded models may take, likewise (default: any)",
    ),
    Flag(
        "wait-for-model",
        "residency.waits",
        boolean,
        "have requests wait until their model is loaded, instead of refusing them meanwhile (default true)",
    ),
    Flag(
        "model-wait-secs",
        "residency.wait_seconds",
        POSITIVE_SECONDS,
        "how long a request waits for its model to be loaded (default 60)",
    ),
    Flag("model-load-thread-count", "load_thread_count", POSITIVE, "models that load beside each other (default 4)"),
    Flag(
        "disable-auto-complete-config",
        "strict_model_config",
        boolean,
        "complete no configuration from the model's file (default false)",
        aliases=("strict-model-config",),
    ),
    Flag(
        "model-config-name",
        "model_config_name",
        str,
        "of models that have a configs/NAME.pbtxt, read that instead of config.pbtxt",
        value="NAME",
    ),
    Flag(
        "model-namespacing",
        "model_namespacing",
        boolean,
        "let models of different repositories have the same name (default false)",
    ),
    Flag(
        "allow-remote-files",
        "allow_remote_files",
        boolean,
        "let load requests bring a model's files, in explicit mode (default false)",
    ),
    Flag(
        "allow-remote-models",
        "allow_remote_models",
        boolean,
        "let load requests with files name models that are in no repository (default false)",
    ),
    Flag(
        "allow-amd-endpoints",
        "allow_amd_endpoints",
        boolean,
        "let clients have files of the repositories served by worker_load (default: in explicit mode)",
    ),
    Flag(
        "max-amd-endpoints",
        "max_amd_endpoints",
        POSITIVE,
        "what worker_load may serve at once, counted with each further instance (default 64)",
    ),
    Flag(
        "max-model-instances",
        "max_model_instances",
        POSITIVE,
        "instances that a model may have (default 8 for each CPU, or 64 for each GPU that it is on)",
    ),
    Flag("max-model-versions", "max_model_versions", POSITIVE, "versions of a model served at once (default 128)"),
    Flag(
        "max-folder-entries",
        "max_folder_entries",
        POSITIVE,
        "files and folders that a model's folder may hold (default 100000)",
    ),
    Flag(
        "allow-worker-load",
        "worker_load_folders",
        Path,
        "a folder whose files clients may have served by worker_load; repeatable",
        repeatable=True,
        value="DIR",
    ),
)

SERVER = (
    Flag("id", "server_id", str, "the server's name in its metadata (default rocserve)", value="NAME"),
    Flag(
        "spin",
        "spin",
        at_least(0, int, most=MOST_SPIN),
        "looks for what comes, each some 3 us, before the thread of requests and answers sleeps; 0 = it sleeps at once"
        " (default 0 with one CPU, 15 with less than four, else 100)",
        value="N",
    ),
    Flag(
        "strict-readiness",
        "readiness",
        readiness_rule,
        "true: ready once what was there at the start serves, whatever new models do; false: once its loads have ended;"
        " always: only while every model serves, as Triton (default true)",
    ),
    Flag("exit-on-error", "exit_on_error", boolean, "end when a model fails to load at the start (default true)"),
    Flag(
        "listen-when-loaded",
        "listen_when_loaded",
        boolean,
        "open the ports of gRPC and HTTP when the models that are there have loaded, for balancers that do not look at"
        " readiness (default false)",
    ),
    Flag(
        "drain-seconds",
        "drain_seconds",
        SECONDS,
        "how long the server serves on, not ready, before its end, while balancers and clients go away (default 0)",
    ),
    Flag(
        "exit-timeout-secs",
        "exit_timeout_seconds",
        SECONDS,
        "how long the end, after --drain-seconds, waits for work in hand (default 30)",
    ),
    Flag(
        "request-timeout-secs",
        "limits.request_seconds",
        SECONDS,
        "how long a model may take to answer a batch; then its worker is killed and started again; 0 = no limit"
        " (default 0)",
    ),
    Flag(
        "hang-timeout-secs",
        "limits.hang_seconds",
        SECONDS,
        "how long a worker may stand still with a batch in hand until it counts as hung and is killed; 0 = no limit"
        " (default 600)",
    ),
    Flag(
        "drain-timeout-secs",
        "limits.drain_seconds",
        SECONDS,
        "how long a version that is unloaded or replaced may take to answer what it took; then its workers are killed;"
        " 0 = no limit (default 60)",
    ),
    Flag(
        "load-timeout-secs",
        "limits.load_seconds",
        SECONDS,
        "how long a model may take to load, compiling not counted; 0 = no limit (default 600)",
    ),
    Flag("max-queue-requests", "max_queue_requests", POSITIVE, "requests that may wait for a version (default 10000)"),
    Flag(
        "max-queue-bytes",
        "max_queue_bytes",
        POSITIVE,
        "bytes of inputs that may wait for a version (default 4294967296)",
    ),
    Flag(
        "max-requests-per-client",
        "max_requests_per_client",
        COUNT,
        "inference requests in flight of one client, which is an address; 0 = any number (default 0)",
    ),
    Flag(
        "max-request-rate-per-client",
        "max_request_rate_per_client",
        RATE,
        "inference requests a second of one client; 0 = any number (default 0)",
        value="NUMBER",
    ),
    Flag(
        "max-request-memory",
        "max_request_memory",
        POSITIVE,
        "bytes of all requests that come in, wait and run, and of answers that are not yet read (default a quarter of"
        " the container's or the machine's memory, at most 8589934592)",
    ),
    Flag(
        "front-ends",
        "front_ends",
        at_least(0, int, most=64),
        "processes that serve gRPC, and as many that serve HTTP; 0 = the server itself does (default 0 with up to 4"
        " CPUs, else one for 3 of them, at most 16)",
        value="N",
    ),
    Flag(
        "write-timeout-secs",
        "write_timeout_seconds",
        POSITIVE_SECONDS,
        "how long a client may not read what it is sent before the answer is given up (default 60)",
    ),
    Flag(
        "admin-address",
        "admin_addresses",
        admin_addresses,
        "where admin calls (loads, settings of log and traces, registration of shared memory) may come from: any, none,"
        " or a list of local, addresses and networks such as local,10.0.0.0/8 (default local; any for calls that want"
        " a secret header or a client's certificate)",
        value="LIST",
    ),
    Flag(
        "allow-client-shm",
        "allow_client_shared_memory",
        boolean,
        "let clients on this machine hand over tensors in shared memory (default false)",
    ),
    Flag(
        "rate-limit",
        "rate_limit",
        str,
        "execution_count: instances run by their priority and the resources that they hold; off: as they are free"
        " (default off)",
        choices=("off", "execution_count"),
    ),
    Flag(
        "rate-limit-resource",
        "rate_limit_resources",
        rate_limit_resource,
        "how much there is of a resource that instances hold; repeatable",
        repeatable=True,
    ),
    Flag(
        "cache-config",
        "cache",
        setting_of("local,size=BYTES"),
        "the response cache, e.g. local,size=104857600; repeatable",
        repeatable=True,
        value="local,SETTING=VALUE",
    ),
    Flag(
        "backend-config",
        "backend_config",
        backend_setting,
        "a setting of one backend, or of all: onnxruntime,default-max-batch-size=8; repeatable",
        repeatable=True,
        value="[BACKEND,]SETTING=VALUE",
    ),
    Flag(
        "host-policy",
        "host_policies",
        setting_of("POLICY,SETTING=VALUE"),
        "where the instances of a host policy run: gpu_0,numa-node=0 or gpu_0,cpu-cores=0-3; repeatable",
        repeatable=True,
        value="POLICY,SETTING=VALUE",
    ),
)

ENGINES = (
    Flag(
        "cache-directory",
        "engines.cache_directory",
        folder,
        "where programs that MIGraphX has compiled, and copies of repositories elsewhere, are kept; several servers may"
        " share it (default rocserve/ in $XDG_CACHE_HOME or ~/.cache)",
    ),
    Flag(
        "cache-size-bytes",
        "engines.cache_bytes",
        POSITIVE,
        "how much the programs may take; those used least lately go first (default 21474836480)",
    ),
    Flag(
        "migraphx-root",
        "engines.migraphx_root",
        folder,
        "a folder that holds MIGraphX together with the C library that it was built for (default"
        " $ROCSERVE_MIGRAPHX_ROOT, else this system's MIGraphX)",
    ),
)

WORKERS = (
    Flag(
        "worker-user",
        "workers.user",
        str,
        "whom models' processes run as; same: the server's own user (default: nobody where the server is root and the"
        " model's files allow it, else the server's own)",
        value="USER[:GROUP]",
    ),
    Flag(
        "worker-environment",
        "workers.environment",
        worker_variables,
        "variables of the server's environment that models get beside those that engines need; repeatable",
        repeatable=True,
    ),
    Flag(
        "worker-memory-bytes",
        "workers.memory_bytes",
        at_least(0, int),
        "memory that a model's process may have, with all that it starts; 0: any (default 0)",
        value="N",
    ),
    Flag(
        "worker-tasks",
        "workers.tasks",
        at_least(0, int),
        "processes and threads that a model's process may have, itself included; 0: any (default 0)",
        value="N",
    ),
    Flag(
        "worker-file-bytes",
        "workers.file_bytes",
        at_least(0, int),
        "the largest file that a model's process may write, its outputs' memory included; 0: any (default 0)",
        value="N",
    ),
    Flag(
        "worker-cgroups",
        "workers.control_groups",
        boolean,
        "have the kernel keep models' memory and tasks by cgroups, where the server's own is delegated to it; else the"
        " server looks at their processes (default true)",
    ),
    Flag(
        "worker-core-dumps",
        "workers.core_dumps",
        boolean,
        "let crashing models leave core dumps, as far as the system's limits do (default false)",
    ),
)
