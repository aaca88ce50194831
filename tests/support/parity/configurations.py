"""Model configurations for both servers: their files, and the steps that ask for them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritonclient.grpc import service_pb2 as pb

from support.parity.exchange import Asked, Call, Exchange, Local, Outcome, Step
from support.parity.models import SCRIPTS
from support.waiting import PATIENCE_SECONDS

SCRIPT = "identity"
_PAUSE_SECONDS = 0.05
"""Between two questions that Triton cannot answer for the moment."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model's folder as files."""

    name: str
    text: str | None
    """The text of config.pbtxt; None: there is none."""
    versions: Sequence[str] = ("1",)
    script: str = SCRIPT
    """The stem of a file of tests/data/parity-models that each version gets; empty: the versions are empty."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files by their path in the folder."""
    override: str | None = None
    """The `config` parameter of the load request."""
    group: str = ""
    """How Triton refuses a bad configuration."""

    def write(self, repository: Path) -> None:
        folder = repository / self.name
        folder.mkdir()
        if self.text is not None:
            (folder / "config.pbtxt").write_text(self.text)
        for version in self.versions:
            (folder / version).mkdir()
            if self.script:
                shutil.copy(SCRIPTS / f"{self.script}.py", folder / version / "model.py")
        for path, data in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    def remove(self, repository: Path) -> None:
        shutil.rmtree(repository / self.name)


@dataclass(frozen=True, slots=True)
class IndexRows:
    """The rows of the repository index about one model."""

    model: str

    def digest(self) -> str:
        return ""

    def ask(self, server: Asked) -> Outcome:
        call = Call("RepositoryIndex", pb.RepositoryIndexRequest())
        outcome = call.ask(server)
        end = time.monotonic() + PATIENCE_SECONDS
        # Triton fails here if the folder of another model disappears while it reads.
        while server.name == "triton" and outcome.status != "OK" and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
            outcome = call.ask(server)
        rows = [row for row in (outcome.answer or {}).get("models", []) if row["name"] == self.model]
        return Outcome(outcome.status, outcome.text, rows)


def load(configuration: Configuration) -> Call:
    request = pb.RepositoryModelLoadRequest(model_name=configuration.name)
    if configuration.override is not None:
        request.parameters["config"].string_param = configuration.override
    return Call("RepositoryModelLoad", request)


def unload(name: str) -> Call:
    return Call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name))


def described(name: str) -> list[Step]:
    """The steps that ask a loaded model."""
    return [
        Call("ModelConfig", pb.ModelConfigRequest(name=name)),
        Call("ModelMetadata", pb.ModelMetadataRequest(name=name)),
    ]


def dropped(configuration: Configuration, repository: Path, asked: Sequence[Step]) -> Exchange:
    """An exchange during which the folder exists: the model is loaded, asked and unloaded."""

    def write(server: Asked) -> None:
        # A Triton that crashed in the middle of its steps leaves its folder.
        if (repository / configuration.name).exists():
            configuration.remove(repository)
        configuration.write(repository)

    def remove(server: Asked) -> None:
        configuration.remove(repository)

    steps = [Local(write), load(configuration), *asked, unload(configuration.name), Local(remove)]
    return Exchange(configuration.name, steps, about=repr(configuration))
