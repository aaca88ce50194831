"""The kinds of PyTorch files, and the engine that runs each; nothing here needs PyTorch."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest
from support.machine import ToldMachine
from support.models import drop

from rocserve.backends.base import EngineChoice
from rocserve.backends.pytorch import BACKEND
from rocserve.backends.pytorch.model_file import FileKind, file_kind
from rocserve.backends.pytorch.parameters import TORCH_COMPILE
from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.repository.engine_plan import plan_engine


class WithoutPyTorch(ToldMachine):
    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return module != "torch" and ToldMachine.is_installed(self, module, files)


class WithPyTorch(ToldMachine):
    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return module == "torch" and not files


def archive(file: Path, *names: str) -> Path:
    with zipfile.ZipFile(file, "w") as written:
        for name in names:
            written.writestr(name, f"the content of {name}")
    return file


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("m/models/model.json", "m/data/weights/weight_0"), FileKind.EXPORTED),
        (("serialized_exported_program.json", "version"), FileKind.EXPORTED),
        (("m/data/aotinductor/model/a.wrapper.so",), FileKind.PACKAGE),
        (("m/constants.pkl", "m/data.pkl", "m/code/__torch__.py"), FileKind.SCRIPT),
    ],
)
def test_kinds(tmp_path: Path, names: tuple[str, ...], kind: FileKind) -> None:
    assert file_kind(archive(tmp_path / "model.pt2", *names)) is kind


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "model.pt2 is not a PyTorch file"),
        (b"\x80\x02pickled", "model.pt2 holds a pickle of weights or of a module, not a program"),
        (b"PK\x03\x04cut", "model.pt2 is cut short or damaged"),
        (b"version https://git-lfs", "model.pt2 is not a PyTorch file; it is a git-LFS pointer"),
    ],
)
def test_what_is_none(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "model.pt2"
    file.write_bytes(content)
    with pytest.raises(ServeError) as raised:
        file_kind(file)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT and raised.value.text.startswith(text)


def test_archives_of_something_else_and_changed_ones(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="is a zip archive without a PyTorch program"):
        file_kind(archive(tmp_path / "model.pt2", "m/readme"))
    file = archive(tmp_path / "other.pt2", "m/models/model.json")
    content = bytearray(file.read_bytes())
    content[content.index(b"content")] ^= 1
    file.write_bytes(content)
    with pytest.raises(ServeError, match=r"other.pt2 is damaged: 'm/models/model.json' in it has another checksum"):
        file_kind(file)


@pytest.mark.parametrize("kind", ["m/models/model.json", "m/data/aotinductor/model/a.wrapper.so", "m/constants.pkl"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "m/data/aotinductor/model/../../../../evil",
            "its member 'm/data/aotinductor/model/../../../../evil' leads out",
        ),
        ("../evil", "its member '../evil' leads out of it"),
        ("/tmp/evil", "its member '/tmp/evil' leads out of it"),
        ("m\\..\\evil", "leads out of it"),
        ("m/link", "its member 'm/link' is a link"),
        ("m/code/twice", "it has 2 members named 'm/code/twice'"),
    ],
)
def test_members_that_pytorch_would_unpack_elsewhere(tmp_path: Path, kind: str, name: str, text: str) -> None:
    file = archive(tmp_path / "model.pt2", kind, "m/code/twice")
    member = zipfile.ZipInfo(name)
    if name == "m/link":
        member.external_attr = 0o120777 << 16
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "a") as written:
        written.writestr(member, "/etc/passwd")
    with pytest.raises(ServeError) as raised:
        file_kind(file)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text.startswith("model.pt2 is refused: ") and text in raised.value.text


def test_an_archive_that_unpacks_to_100_gigabytes_is_refused_at_once(tmp_path: Path) -> None:
    """Its directory declares that size, whatever the archive holds."""
    file = archive(tmp_path / "model.pt2", "m/models/model.json", "m/data/weights/weight_0")
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = (3 << 30).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(
        ServeError, match=r"model.pt2 is refused: it unpacks to 3072 MiB, 1024 MiB at most are possible"
    ):
        file_kind(file)


def test_without_pytorch_the_text_says_what_to_install() -> None:
    with pytest.raises(ServeError) as raised:
        BACKEND.engine_for(ModelConfig(name="m"), WithoutPyTorch())
    assert raised.value.code is StatusCode.UNAVAILABLE
    assert raised.value.text.startswith(
        "model 'm' needs PyTorch, which is not installed; install it where rocserve is:"
    )


def test_a_file_that_the_backend_does_not_read_is_reported_before_pytorch(tmp_path: Path) -> None:
    folder = drop(tmp_path, "m", b"", 'backend: "pytorch"')
    (definition,) = FolderReading(folder, discover_backends()).definitions()
    with pytest.raises(ServeError, match=r"expected model\.pt2 or model\.pt, found model\.onnx\."):
        plan_engine(definition, folder / "1", WithoutPyTorch())


@pytest.mark.parametrize(
    ("parameters", "engine"),
    [
        ({}, "eager"),
        ({"engine": "auto"}, "eager"),
        ({"engine": "inductor"}, "inductor"),
        ({"engine": "migraphx-onnx"}, "migraphx-onnx"),
        ({TORCH_COMPILE: '{"mode": "default"}'}, "inductor"),
        ({TORCH_COMPILE: '{"disable": true}'}, "eager"),
        ({TORCH_COMPILE: "{}", "engine": "eager"}, "eager"),
    ],
)
def test_engines(parameters: dict[str, str], engine: str) -> None:
    choice = BACKEND.engine_for(ModelConfig(name="m", parameters=parameters), WithPyTorch(migraphx=""))
    assert choice.engine.name == engine


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"engine": "tensorrt"}, "parameter 'engine' of model 'm' must be one of auto, eager, inductor, migraphx, "),
        ({"engine": "migraphx-onnx"}, "model 'm' needs MIGraphX (parameter 'engine' says so): it is not installed"),
        (
            {TORCH_COMPILE: "[]"},
            f"parameter '{TORCH_COMPILE}' of model 'm' must be a JSON object with any of fullgraph",
        ),
        ({TORCH_COMPILE: '{"mode": 1}'}, f"parameter '{TORCH_COMPILE}' of model 'm' must be a JSON object with any of"),
        ({TORCH_COMPILE: "[" * 100_000}, f"parameter '{TORCH_COMPILE}' of model 'm' must be a JSON object with any of"),
        ({TORCH_COMPILE: '{"backend": "onnxrt"}'}, f"parameter '{TORCH_COMPILE}' of model 'm' names backend"),
    ],
)
def test_engines_that_cannot_be_had(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(ServeError) as raised:
        BACKEND.engine_for(ModelConfig(name="m", parameters=parameters), WithPyTorch())
    assert raised.value.text.startswith(text)


class WithAmdGpu(ToldMachine):
    """A machine with PyTorch's build for AMD GPUs, and with torch_migraphx and its dependencies."""

    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return module in ("torch", "torch_migraphx", "migraphx")


class WithoutMigraphxModule(WithAmdGpu):
    def is_installed(self, module: str, files: tuple[str, ...] = ()) -> bool:
        return module in ("torch", "torch_migraphx")


def model(*kinds: InstanceKind, filename: str = "", platform: str = "", **parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m",
        platform=platform,
        backend="pytorch",
        default_model_filename=filename,
        instance_groups=tuple(InstanceGroup("", kind, 1) for kind in kinds),
        parameters=parameters,
    )


AMD_GPU = WithAmdGpu(gpus=(0,))
IN_ITS_PLACE = ["migraphx", "eager", "eager on the CPU"]


@pytest.mark.parametrize(
    ("config", "machine", "engines"),
    [
        (model(), AMD_GPU, IN_ITS_PLACE),
        (model(filename="model.pt2"), AMD_GPU, IN_ITS_PLACE),
        (model(InstanceKind.AUTO, engine="auto"), AMD_GPU, IN_ITS_PLACE),
        (model(InstanceKind.GPU, engine="auto"), AMD_GPU, IN_ITS_PLACE),
        (model(InstanceKind.GPU), AMD_GPU, ["migraphx", "eager"]),
        (model(InstanceKind.CPU), AMD_GPU, ["eager"]),
        (model(filename="model.pt"), AMD_GPU, ["eager", "eager on the CPU"]),
        (model(platform="torch_aoti"), AMD_GPU, ["eager", "eager on the CPU"]),
        (model(**{TORCH_COMPILE: "{}"}), AMD_GPU, ["inductor", "inductor on the CPU"]),
        (model(InstanceKind.MODEL), AMD_GPU, ["eager"]),
        (model(InstanceKind.GPU, InstanceKind.MODEL), AMD_GPU, ["eager"]),
        (model(InstanceKind.MODEL, **{TORCH_COMPILE: "{}"}), AMD_GPU, ["inductor"]),
        (model(engine="eager"), AMD_GPU, ["eager"]),
        (model(engine="inductor"), AMD_GPU, ["inductor"]),
        (model(engine="migraphx"), AMD_GPU, ["migraphx"]),
        (model(), WithAmdGpu(), ["eager"]),
        (model(), WithoutMigraphxModule(gpus=(0,)), ["eager", "eager on the CPU"]),
        # With PyTorch's builds for CPUs and for NVIDIA GPUs these engines run only if they are named.
        (model(), WithPyTorch(gpus=(0,)), ["eager"]),
        (model(InstanceKind.GPU), WithPyTorch(gpus=(0,)), ["eager"]),
    ],
)
def test_auto_goes_by_the_machine_and_what_is_behind_it(
    config: ModelConfig, machine: ToldMachine, engines: list[str]
) -> None:
    choice: EngineChoice | None = BACKEND.engine_for(config, machine)
    found = []
    while choice is not None:
        found.append(choice.engine.name if choice.engine.gpu_module else f"{choice.engine.name} on the CPU")
        choice = choice.fallback
    assert found == engines


def test_why_it_is_migraphx() -> None:
    assert BACKEND.engine_for(model(), AMD_GPU).reason == "torch_migraphx and an AMD GPU were found"
