"""Loading and unloading by request: the answers of the calls, and the index afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.parity.exchange import Call, Exchange, Step
from support.parity.inference import infer, raw_input
from support.parity.models import (
    SCRIPTS,
    ParityModel,
    add_sub_tensors,
    ensemble,
    parity_models,
    python,
    step,
    tensor,
    write_model,
)
from support.parity.pair import Pair
from support.parity.repository import Index, load, load_with, unload
from support.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb

ADD_SUB = python(add_sub_tensors())
SEEN = python(tensor("input", "IN", "FP32", [-1], "optional: true") + tensor("output", "SEEN", "STRING", [1]), 0)
ROW = [[1, 2, 3, 4]]
_PLAIN = ("fresh", "twice", "unloaded", "overridden", "kept", "files", "left", "asked", "dependent", "renewed")


def chain(member: str) -> str:
    members = step(member, {f"INPUT{i}": f"INPUT{i}" for i in (0, 1)}, {f"OUTPUT{i}": f"OUTPUT{i}" for i in (0, 1)})
    return ensemble(add_sub_tensors(), members)


CONTROLLED = [
    *(ParityModel(f"control_{name}", ADD_SUB, "add_sub") for name in _PLAIN),
    ParityModel("control_versions", SEEN, "seen", ("1", "2", "02")),
    ParityModel("control_no_version", ADD_SUB, "add_sub", ()),
    ParityModel("control_odd_version", ADD_SUB, "add_sub", ("one", "01")),
    ParityModel("control_no_file", ADD_SUB),
    ParityModel("control_raises", ADD_SUB, "broken"),
    ParityModel("control_no_backend", 'backend: "nothing"\n' + add_sub_tensors(), "add_sub"),
    ParityModel("control_no_syntax", "backend: {", "add_sub"),
    ParityModel("control_chain", chain("control_dependent")),
    ParityModel("control_chain_without_member", chain("control_nobody")),
]


@pytest.fixture(scope="module")
def scratch(pair: Pair) -> Iterator[Path]:
    for model in CONTROLLED:
        pair.dropped(write_model(pair.scratch, model))
    # rocserve's index shows the result of its last scan; Triton scans when it is asked.
    shown = Index([model.name for model in CONTROLLED])
    wait_until(lambda: len(shown.ask(pair.rocserve).answer) == len(CONTROLLED), "the look that finds the models")
    alone = [[exchange] for exchange in (*LIFE_CASES, *GOOD_LOADS)]
    with pair.asking_ahead(*alone, [*REFUSED_LOADS, *UNLOADS], DEPENDENT_CASES):
        yield pair.scratch


def ask(model: str) -> Call:
    return Call("ModelInfer", infer(model, raw_input("INPUT0", ROW), raw_input("INPUT1", ROW)))


def ready(model: str) -> Call:
    return Call("ModelReady", pb.ModelReadyRequest(name=model))


def config(model: str) -> Call:
    return Call("ModelConfig", pb.ModelConfigRequest(name=model))


def exchange(name: str, *steps: Step) -> Exchange:
    return Exchange(name, steps, ordered=False)


def override(**changes: object) -> str:
    tensors = {
        kind: [{"name": f"{kind.upper()}{index}", "data_type": "TYPE_INT32", "dims": [4]} for index in (0, 1)]
        for kind in ("input", "output")
    }
    return json.dumps({"backend": "python", "max_batch_size": 3, **tensors, **changes})


CODE = (SCRIPTS / "add_sub.py").read_bytes()
LIFE_CASES = [
    exchange(
        "load and ask",
        *(Index(["control_fresh"]), ready("control_fresh"), ask("control_fresh"), load("control_fresh")),
        *(Index(["control_fresh"]), ready("control_fresh"), ask("control_fresh"), Index(["control_fresh"], ready=True)),
    ),
    exchange(
        "load twice", load("control_twice"), load("control_twice"), ask("control_twice"), Index(["control_twice"])
    ),
    exchange(
        "unload",
        *(load("control_unloaded"), unload("control_unloaded"), Index(["control_unloaded"])),
        *(Index(["control_unloaded"], ready=True), ready("control_unloaded"), ask("control_unloaded")),
        Call("ModelMetadata", pb.ModelMetadataRequest(name="control_unloaded")),
        Call("ModelStatistics", pb.ModelStatisticsRequest(name="control_unloaded")),
        Call("ModelInfer", infer("control_unloaded", version="1")),
        *(unload("control_unloaded"), load("control_unloaded"), ask("control_unloaded")),
    ),
    exchange(
        "versions",
        load("control_versions"),
        Index(["control_versions"]),
        unload("control_versions"),
        Index(["control_versions"]),
    ),
]
REFUSED_LOADS = [
    exchange("load of nothing", load("")),
    exchange("load of a missing model", load("control_missing"), Index(["control_missing"])),
    exchange("load with a repository", load("control_asked", repository="elsewhere")),
    exchange("load of a path", load("../models/add_sub")),
    exchange("load of a file in a model", load("add_sub/1")),
    exchange("load without a version", load("control_no_version"), Index(["control_no_version"])),
    exchange("load with odd versions", load("control_odd_version"), Index(["control_odd_version"])),
    exchange("load without a file", load("control_no_file")),
    exchange("load of a model that raises", load("control_raises")),
    exchange("load with an unknown backend", load("control_no_backend"), Index(["control_no_backend"])),
    exchange("load of a faulty configuration", load("control_no_syntax"), Index(["control_no_syntax"])),
    exchange(
        "load of a chain without its member",
        load("control_chain_without_member"),
        Index(["control_chain_without_member"]),
    ),
    exchange("load with an unknown parameter", load("control_asked", colour="red")),
    exchange("load with an unknown parameter and a repository", load("control_asked", repository="x", colour="red")),
    exchange("load with a configuration that is a flag", load("control_asked", config=True)),
    exchange("load with a configuration that is a number", load("control_asked", config=1)),
    exchange("load with a configuration that is bytes", load("control_asked", config=override().encode())),
    exchange("load with a configuration that has no value", load("control_asked", config=None)),
    exchange("load with an empty configuration", load("control_asked", config="")),
    exchange("load with a configuration that is not JSON", load("control_asked", config="{")),
    exchange("load with a configuration of an unknown field", load("control_asked", config=override(colour="red"))),
    exchange("load with a configuration of another name", load("control_asked", config=override(name="other"))),
    exchange(
        "load with an unknown backend in the configuration", load("control_asked", config=override(backend="nothing"))
    ),
    exchange("load with a file but no configuration", load_with("control_asked", {"file:1/model.py": CODE})),
    exchange(
        "load with a file that is text", load_with("control_asked", {"config": override(), "file:1/model.py": "x"})
    ),
    exchange(
        "load with a file that is a flag", load_with("control_asked", {"config": override(), "file:1/model.py": True})
    ),
    *(
        exchange(
            f"load with the file {path!r}", load_with("control_asked", {"config": override(), f"file:{path}": CODE})
        )
        for path in ("../evil.py", "1/../../evil.py", "/tmp/evil.py", "1/../../../../../../tmp/evil.py", "")
    ),
    exchange("model with wrong loads behind it", Index(["control_asked"]), ask("control_asked")),
]
GOOD_LOADS = [
    exchange(
        "load with a configuration",
        *(load("control_overridden", config=override()), config("control_overridden"), ask("control_overridden")),
        *(load("control_overridden"), config("control_overridden")),
    ),
    exchange(
        "load with files",
        load_with("control_files", {"config": override(), "file:1/model.py": CODE, "file:7/model.py": CODE}),
    ),
    exchange(
        "load with files of a model that there is none of",
        load_with("control_sent", {"config": override(), "file:1/model.py": CODE}),
    ),
    exchange(
        "failed load of a model that serves",
        *(load("control_kept"), ask("control_kept"), load("control_kept", config=override(backend="nothing"))),
        *(ask("control_kept"), ready("control_kept"), Index(["control_kept"])),
    ),
]
UNLOADS = [
    exchange("unload of nothing", unload("")),
    exchange("unload of a missing model", unload("control_missing"), Index(["control_missing"])),
    exchange("unload of a model that was never loaded", unload("control_left"), Index(["control_left"])),
    exchange("unload with a repository", unload("control_left", repository="elsewhere")),
    exchange(
        "unload with an unknown parameter",
        load("control_left"),
        unload("control_left", colour="red"),
        ready("control_left"),
    ),
    *(
        exchange(
            f"unload with dependents {value!r}",
            load("control_left"),
            unload("control_left", unload_dependents=value),
            ready("control_left"),
        )
        for value in (True, False, 1, "true", None)
    ),
    exchange("index of a repository", Call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="elsewhere"))),
]
DEPENDENT_CASES = [
    exchange(
        "load of a chain", *(load("control_chain"), Index(["control_chain", "control_dependent"]), ask("control_chain"))
    ),
    exchange(
        "unload of a chain alone",
        *(load("control_chain"), unload("control_chain"), Index(["control_chain", "control_dependent"])),
        *(ask("control_dependent"), ask("control_chain")),
    ),
    exchange(
        "unload of a chain and its dependents",
        *(load("control_chain"), unload("control_chain", unload_dependents=True)),
        *(Index(["control_chain", "control_dependent"]), ask("control_dependent"), ask("control_chain")),
    ),
]


@pytest.mark.parametrize(
    "exchange",
    [*LIFE_CASES, *REFUSED_LOADS, *GOOD_LOADS, *UNLOADS, *DEPENDENT_CASES],
    ids=lambda exchange: exchange.name,
)
def test_repository_control(pair: Pair, scratch: Path, exchange: Exchange) -> None:
    pair.compare(exchange)
    assert not (pair.scratch.parent / "evil.py").exists()
    assert not Path("/tmp/evil.py").exists()


@pytest.mark.usefixtures("scratch")
def test_index_of_the_models_of_the_start(pair: Pair) -> None:
    names = [model.name for model in parity_models()]
    pair.compare(Exchange("index", [Index(names), Index(names, ready=True)]))
