"""Known differences: where rocserve deliberately answers otherwise than Triton. A test asserts both sides, so that an
entry that is no longer true is noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from support.parity.exchange import Outcome


@dataclass(frozen=True, slots=True)
class Difference:
    """What Triton says and what rocserve says, as patterns to find in the printed outcomes."""

    reason: str
    exchanges: Sequence[str]
    """Names of the exchanges that show the difference: in each of them at least one step's outcomes differ in this
    way."""
    triton: str | None
    """None: Triton is not asked, because the exchange crashes it, blocks it for good, or gets a random answer."""
    rocserve: str

    def explains(self, triton: Outcome | None, rocserve: Outcome) -> bool:
        """Whether a pair of outcomes differs in this way."""
        if re.search(self.rocserve, str(rocserve)) is None:
            return False
        if self.triton is None or triton is None:
            return self.triton is None and triton is None
        return re.search(self.triton, str(triton)) is not None


_ALL_EXTENSIONS = (
    r"\['classification', 'sequence', 'model_repository', 'model_repository\(unload_dependents\)', 'schedule_policy',"
    r" 'model_configuration', 'system_shared_memory', 'cuda_shared_memory', 'binary_tensor_data', 'parameters',"
    r" 'statistics', 'trace', 'logging'(, 'migraphx'|, 'rocal')*\]"
)


def health_bodies(exchanges: Sequence[str]) -> Difference:
    """The differences in HTTP health answers in these exchanges."""
    return Difference(
        "Health over HTTP has Open Inference's bodies, which KServe's client reads",
        exchanges,
        "^(200|400): ",
        "'(live|ready)': (True|False)",
    )


DELIBERATE_DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "The server gives its own name and version, and the workers of AMD Inference Server that it has",
        ["server metadata", "HTTP: server metadata"],
        rf"{{'name': 'triton', 'version': '2\.51\.0', 'extensions': {_ALL_EXTENSIONS}}}",
        rf"{{'name': 'rocserve', 'version': '[0-9.]+', 'extensions': {_ALL_EXTENSIONS[:-2]}, 'migraphx', 'rocal'\]}}",
    ),
    health_bodies(
        [
            "HTTP: live",
            "HTTP: model ready",
            "HTTP: version ready",
            "HTTP: unknown model ready",
            "HTTP: unknown version ready",
            "ready without models",
            "ready with a model",
            "ready with an unloaded model",
            "ready after a load of nothing",
            "ready with a model that cannot be loaded",
            "ready when that model is unloaded",
            "ready with an unknown backend",
        ]
    ),
    Difference(
        "The error for an unknown method names it",
        ["unknown method", "unknown service"],
        "^UNIMPLEMENTED: $",
        r"^UNIMPLEMENTED: Method not found! This server does not serve '/inference\..*No",
    ),
    Difference(
        "The error for a wrong number of elements names the input and both numbers",
        ["HTTP: too little data", "HTTP: too much data"],
        "Shape does not match true shape of 'data' field\"",
        "Shape does not match true shape of 'data' field; input 'INPUT1' has [25] elements, expected 4 for its shape",
    ),
    Difference(
        "A version must be a number; Triton accepts text after the number",
        [
            *(
                f"{what} {version!r}"
                for what in (
                    "ModelReady versions",
                    "ModelMetadata versions",
                    "ModelConfig versions",
                    "ModelStatistics idle",
                )
                for version in (" 3", "3 ", "3x")
            ),
            *(f"version {version!r}" for version in ("-0", " 3", "3 ", "3.0", "1e1", "0x3")),
            "version '+3' of versions",
        ],
        "^OK|^NOT_FOUND: .* version 0 is not found",
        "^INVALID_ARGUMENT: failed to get model version from specified version string",
    ),
    Difference(
        "Texts of a request keep their zero bytes; Triton cuts them off there",
        ["an id with a zero byte", "model name with a zero byte"],
        r"'id': 'a',|'add' is not found",
        r"'id': 'a\\x00b'|'add\0sub' is not found",
    ),
    Difference(
        "An empty list is written with both brackets",
        ["one input too many", "too many optional inputs"],
        r"missing required input\(s\) \]\.",
        r"missing required input\(s\) \[\]\.",
    ),
    Difference(
        "An output may be requested once, as in Triton since 26.05",
        [
            "an output twice",
            "an output twice and another",
            "classes of an output that is asked for twice",
            "different classes of an output that is asked for twice",
        ],
        "^OK",
        r"^INVALID_ARGUMENT: \[request id: <id_unknown>\] output 'OUTPUT(0|1|_FP32)' already exists in request$",
    ),
    Difference(
        "A model that batches may be asked without inputs; its backend decides",
        ["no optional input"],
        "out of bounds index 0: request has 0 inputs",
        "^OK",
    ),
    Difference(
        "A batch has at least one row; Triton takes 0 rows for an omitted dimension",
        ["batch of zero", "batch below zero"],
        "Expected 16, got 0|batch size does not match other inputs",
        "inference request batch-size must be >= 1 for 'add_sub'",
    ),
    Difference(
        "The size of an input is computed without overflow",
        ["shape that overflows"],
        "Expected 0, got 4",
        "Expected 36893488147419103232, got 4",
    ),
    Difference(
        "The error for an unknown datatype shows what the client wrote",
        [
            "no datatype",
            "unknown datatype",
            "datatype in small letters",
            "datatype as in a configuration",
            "STRING in place of BYTES",
            "typed contents of an unknown datatype",
        ],
        "'<invalid>'",
        "data-type is '(|INT33|int32|TYPE_INT32|STRING)',|expected datatype 'INT33'",
    ),
    Difference(
        "Cut BYTES elements are refused before the backend, with the request's id and the model",
        ["element of BYTES that is cut off", "length of BYTES that is huge", "BYTES cut off in shared memory"],
        "^INVALID_ARGUMENT: incomplete string data for inference input 'INPUT_BYTES', expecting",
        r"^INVALID_ARGUMENT: \[request id: <id_unknown>\] incomplete string data for inference input 'INPUT_BYTES' for",
    ),
    Difference(
        "Errors in a model's code do not show the server's folders",
        [
            "model that raises",
            "unequal variable dimensions",
            "load of a model that raises",
            "ready with a model that cannot be loaded",
            "statistics: a model that fails",
            "statistics: a chain whose member fails",
        ],
        r"Error: [^\n]*\n\nAt:\n  /.*model\.py\(\d+\): (execute|initialize)",
        r"Error: [^\n]*(;)?$",
    ),
    Difference(
        "Classification refuses BYTES; Triton reads them as numbers and crashes",
        ["classes of BYTES, which cannot be ranked"],
        None,
        "^INVALID_ARGUMENT: class result not available for output due to unsupported type 'BYTES'$",
    ),
    Difference(
        "Classification also ranks BOOL and FP16",
        ["classes of BOOL, which Triton does not rank", "classes of FP16, which Triton does not rank"],
        "^INVALID_ARGUMENT: class result not available for output due to unsupported type",
        "^OK",
    ),
    Difference(
        "A count of classes beyond 32 bits is not truncated",
        ["1099511627776 classes"],
        r"'shape': \['2', '0'\]",
        r"'shape': \['2', '4'\]",
    ),
    Difference(
        "A version folder without the model's file is refused; Triton never answers",
        ["load without a file"],
        None,
        "^INVALID_ARGUMENT: load failed for model 'control_no_file': .* unable to find the model file of",
    ),
    Difference(
        "Load requests cannot bring code",
        [
            "load with files",
            "load with files of a model that there is none of",
            "HTTP: load with a file that is not base64",
        ],
        "^OK|^400: .*load failed for model 'http_missing': version 1 is at UNAVAILABLE state",
        "^(PERMISSION_DENIED|403): .*models of backend 'python' are only loaded from the repository, not from",
    ),
    Difference(
        "Files of a load request need a configuration and stay in their folder; the refusal says so",
        [
            "load with a file but no configuration",
            "load with the file '../evil.py'",
            "load with the file '1/../../evil.py'",
            "load with the file '/tmp/evil.py'",
            "load with the file '1/../../../../../../tmp/evil.py'",
            "load with the file ''",
        ],
        "^INTERNAL: failed to load 'control_asked', failed to poll|at least one version must be available",
        "^INVALID_ARGUMENT: failed to load 'control_asked', load parameter 'file:.*' must be"
        "|^INTERNAL: failed to load 'control_asked', failed to poll from model repository: files are given",
    ),
    Difference(
        "The index says why a model could not be read or completed",
        [
            "load without a version",
            "load with odd versions",
            "load of a faulty configuration",
            "load of a chain without its member",
        ],
        r"^OK:  \[({'name': '\w+'})?\]$",
        "^OK:  .*'reason': '|^OK:  .*'reason': \"",
    ),
    Difference(
        "The error for an unknown backend lists the known ones",
        [
            "load with an unknown backend",
            "load with an unknown backend in the configuration",
            "model with wrong loads behind it",
            "failed load of a model that serves",
            "ready with an unknown backend",
        ],
        "try specifying runtime on the model configuration",
        "try specifying runtime on the model configuration.*expected one of: .*onnxruntime",
    ),
    Difference(
        "Unloading a model that could not be loaded forgets it",
        ["ready when that model is unloaded"],
        r"^OK:  {}$|b'\\x08\\x02'|^400:",
        r"^OK:  {'ready': True}$|b'\\x08\\x01'|^200:",
    ),
    Difference(
        "An unload with a parameter that it does not know is refused: a misspelt version would unload all versions",
        ["unload with an unknown parameter"],
        r"^OK|b'\\x08\\x02'|^400:",
        r"^INVALID_ARGUMENT: unrecognized unload parameter 'colour'|^OK:  {'ready': True}$|b'\\x08\\x01'|^200:",
    ),
    Difference(
        "An empty text as sequence id means no sequence",
        ["parameter sequence_id = empty text"],
        '"correlation_id": ""',
        '"correlation_id": 0',
    ),
    Difference(
        "Shared memory may begin and end within a page",
        ["register from within a page"],
        "unable to process address space",
        "^OK",
    ),
    Difference(
        "Regions are checked as in newer Tritons: keys are not empty, ends do not overflow, parts are not empty",
        ["register without a key", "register an offset that overflows", "input of no size"],
        "^INTERNAL: Unable to open shared memory region: ''|unable to process address|Invalid offset",
        "invalid shm key ''|'r': invalid args|input byte size mismatch",
    ),
    Difference(
        "A part of shared memory is read at its offset; Triton reads elsewhere",
        ["inputs in a part", "input over the end of a part"],
        None,
        r"^OK:  {'model_name'|^INVALID_ARGUMENT: Invalid offset \+ byte size for shared memory region: 'r'$",
    ),
    Difference(
        "Overlapping parts of shared memory may be registered",
        ["register two", "unregister all", "input in two regions"],
        "^INTERNAL: Invalid shared memory region: '/rocserve_parity'$|^NOT_FOUND: .*'b'$|^OK",
        "^OK",
    ),
    Difference(
        "The index shows with READY that newer content failed",
        ["failed load of a model that serves"],
        "'state': 'READY'}",
        "'state': 'READY', 'reason': .newer content failed to load: ",
    ),
    Difference(
        "CUDA regions are refused if there is no GPU",
        ["CUDA: register"],
        "^INVALID_ARGUMENT: failed to register shared memory region: invalid args$",
        "^INVALID_ARGUMENT: failed to register CUDA shared memory region: 'c', GPUs not supported$",
    ),
    Difference(
        "Requests that a Python model answers with an error have failed; Triton counts successes and executions",
        ["statistics: a model that fails", "statistics: a chain whose member fails"],
        "'execution_count': '[35]'.*'success': {'count': '[23]'",
        "'execution_count': '[12]'.*'success': {'count': '[12]'",
    ),
    Difference(
        "Responses of decoupled models are counted, as newer Tritons do for other backends",
        ["statistics: a decoupled model"],
        r"'model_stats'|^OK:  \[{(?!.*response_stats)",
        "'response_stats': {",
    ),
    Difference(
        "An ensemble's failure is counted once; Triton counts it twice",
        ["statistics: a chain whose member fails"],
        "'name': 'counted_faulty_chain'.*'fail': {'count': '4'",
        "'name': 'counted_faulty_chain'.*'fail': {'count': '2'",
    ),
    Difference(
        "AMD Inference Server's list of models has a path",
        ["HTTP: GET /v2/models"],
        "^404: ",
        r"^200: .*'body': {'models': \[",
    ),
    Difference("The page has a path", ["HTTP: GET /"], "^404: ", "^200: "),
    Difference(
        "The health service knows services and models by name",
        ["health of nothing known"],
        r"^OK:  b'\\x08\\x01'$",
        "^NOT_FOUND",
    ),
    Difference(
        "The response cache distinguishes requests for different outputs, and to a Python model with other parameters",
        ["statistics: a cache and other outputs"],
        "'name': 'OUTPUT1'|'cache_hit': {'count': '2'",
        "'outputs': \\[{'name': 'OUTPUT0', [^}]*}\\]|'cache_miss': {'count': '3'",
    ),
    Difference(
        "Metadata include how a model is run",
        ["HTTP: model metadata", "HTTP: version metadata"],
        "^200: ",
        "'properties': {.*'engine': 'python'",
    ),
    Difference(
        "A wrong JSON length or compression is an error, and is not read as a raw tensor",
        ["HTTP: header length that is not a number", "HTTP: gzip that is none"],
        "Raw request must only have 1 input",
        "Unable to parse Inference-Header-Content-Length|is not valid gzip or deflate data",
    ),
    Difference(
        "unload_dependents is a boolean over HTTP too",
        ["HTTP: unload with dependents of text"],
        "^200: ",
        "Unable to parse 'unload_dependents'",
    ),
    Difference(
        "Errors of generate have an error status",
        ["HTTP: generate too much", "HTTP: generate nothing", "HTTP: generate an error"],
        "^200: .*generate expects model to produce exactly 1 response",
        "^500: .*generate expects model to produce exactly 1 response",
    ),
    Difference(
        "Parameters may be unsigned integers",
        ["parameter unsigned = unsigned number", "parameter timeout = unsigned"],
        "^INVALID_ARGUMENT: invalid value type for '(unsigned|timeout)' parameter, expected int64_param",
        "^OK",
    ),
    Difference(
        "A negative timeout is refused; Triton takes it for an endless one",
        ["parameter timeout = below zero"],
        "^OK.*18446744073709551615|^OK",
        "^INVALID_ARGUMENT: invalid value for 'timeout', expected value >= 0.$",
    ),
    Difference(
        "A request is validated before the server checks whether its model is decoupled",
        ["wrong input of a decoupled model by ModelInfer"],
        "^UNIMPLEMENTED: ModelInfer RPC doesn't support models with decoupled transaction policy$",
        "^INVALID_ARGUMENT: .* inference input 'IN' data-type is 'FP32', but model 'repeat' expects 'INT32'$",
    ),
    Difference(
        "A Python model that returns None is an error immediately; Triton never answers",
        ["model that answers with None"],
        None,
        "^INTERNAL: model 'faults' released a request without a response$",
    ),
    Difference(
        "An output that a Python model returns twice is right both times; Triton mixes the two up",
        ["model that answers oddly: twice"],
        r"'shape': \['1', '1'\]}, {'name': 'OUT'}",
        r"'shape': \['1'\]}, {'name': 'OUT', 'datatype': 'FP32', 'shape': \['1'\]}",
    ),
    Difference(
        "Requests refused by a full queue count as failures; Triton does not count them",
        ["batching: a full queue", "batching: the queue of one level is full"],
        r"'fail': {}",
        r"'fail': {'count': '[12]'}",
    ),
    Difference(
        "Sequence ids may be texts, as in newer versions of Triton; 24.10 corrupts their control input",
        ["sequences: texts as ids", "sequences: a row of nobody with texts", "sequences: a number for a text"],
        "^INVALID_ARGUMENT: unexpected number of string elements 2 for inference input 'ID', expecting 1$",
        r"^OK: .*'SEEN'|^INVALID_ARGUMENT: .* 'ID' data-type is 'UINT64', but model 'sequence_\d+' expects 'BYTES'$",
    ),
    Difference(
        "A text for a numeric sequence id is refused, as in newer versions of Triton; 24.10 reports a memory error",
        ["sequences: a text for a number"],
        None,
        r"^INVALID_ARGUMENT: .* 'ID' data-type is 'BYTES', but model 'sequence_\d+' expects 'UINT64'$",
    ),
    Difference(
        "The end of an iterative sequence is not a failure; Triton counts its internal request for it",
        ["sequences: iterative", "sequences: iterative, oldest", "sequences: iterative, not again"],
        r"'fail': {'count': '\d+', 'ns': 1}",
        r"'fail': {}",
    ),
    Difference(
        "A malformed message is INVALID_ARGUMENT with its fault",
        [
            "no message",
            "message that is cut off",
            "field number zero",
            "model name that is not UTF-8",
            "id that is not UTF-8",
            "group that does not end",
            "malformed ServerLive",
            "malformed ModelReady",
            "malformed ModelStatistics",
            "malformed RepositoryModelLoad",
        ],
        "^INTERNAL: Unable to parse request$",
        "^INVALID_ARGUMENT: .*the request is not a valid (message|inference.[A-Za-z]+Request): .+",
    ),
)
