"""The header of compiled programs, read without loading them, from files that the real MIGraphX wrote."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from support import migraphx_models
from support.migraphx import run_with_migraphx

from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment
from rocserve.backends.migraphx.mxr_file import MxrFile, check_mxr, read_mxr, sibling_model
from rocserve.backends.migraphx.options import Target
from rocserve.core.errors import ServeError, StatusCode

_WRITE = """
import sys
from pathlib import Path
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.backends.migraphx.installation import find_installation
from rocserve.settings import EngineSettings

model, folder = Path(sys.argv[1]), Path(sys.argv[2])
binding = open_binding(find_installation(EngineSettings()))
program = binding.parse_onnx(model)
program.save(folder / "saved.mxr")
program.compile("ref")
program.save(folder / "compiled.mxr")
print(binding.migraphx_version)
"""

_KERNEL = b"\x7fELF...amdhsa.target\xd9\x28amdgcn-amd-amdhsa--%s:sramecc+:xnack-\xae"


@pytest.fixture(scope="module")
def programs(migraphx_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with compiled.mxr, with saved.mxr (not compiled), and version.txt with MIGraphX's version."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "model.onnx").write_bytes(migraphx_models.mlp())
    done = run_with_migraphx(migraphx_root, _WRITE, str(folder / "model.onnx"), str(folder))
    assert done.returncode == 0, done.stderr
    (folder / "version.txt").write_text(done.stdout.strip())
    return folder


def _file(path: Path, *, targets: tuple[str, ...] = ("gpu",), version: str = "2.14.0", body: bytes = b"") -> Path:
    """The head and the names that the reader looks at, as MIGraphX writes them for a GPU."""
    names = b"".join(b"\x81" + _text("name") + _text(name) for name in targets)
    head = b"\x85" + _text("version") + b"\x07" + _text("migraphx_version") + _text(version)
    head += _text("targets") + bytes([0x90 | len(targets)]) + names
    head += _text("contexts") + b"\x91\x82" + _text("events") + b"\x00" + _text("streams") + b"\x01"
    path.write_bytes(head + _text("modules") + b"\x81" + _text("main") + b"\xc6" + struct.pack(">I", len(body)) + body)
    return path


def _text(text: str) -> bytes:
    return bytes([0xA0 | len(text)]) + text.encode()


def _refusal(path: Path, environment: ProgramEnvironment, target: Target) -> str:
    with pytest.raises(ServeError) as error:
        check_mxr(path, environment, target)
    assert error.value.code is StatusCode.INVALID_ARGUMENT
    return error.value.text


def test_a_program_of_the_real_migraphx(programs: Path) -> None:
    version = (programs / "version.txt").read_text()
    read = read_mxr(programs / "compiled.mxr")
    assert read == MxrFile(read.format_version, version, ("ref",), (), False)
    assert check_mxr(programs / "compiled.mxr", ProgramEnvironment(version), Target.REF) == read
    # If MIGraphX's version is unknown, MIGraphX itself checks it.
    assert check_mxr(programs / "compiled.mxr", ProgramEnvironment(""), Target.REF) == read


def test_one_that_does_not_fit(programs: Path) -> None:
    version = (programs / "version.txt").read_text()
    path = programs / "compiled.mxr"
    for_gpu = _refusal(path, ProgramEnvironment(version, "7.1.1", "gfx90a"), Target.GPU)
    assert "MIGraphX program compiled.mxr was compiled for target ref, but is to run on target gpu" in for_gpu
    assert "put its ONNX file next to it as compiled.onnx" in for_gpu
    older = _refusal(path, ProgramEnvironment("9.9.9"), Target.REF)
    assert f"was compiled by MIGraphX {version} (file version " in older and "and this is MIGraphX 9.9.9" in older
    saved = _refusal(programs / "saved.mxr", ProgramEnvironment(version), Target.REF)
    assert "MIGraphX program saved.mxr has not been compiled, only saved" in saved


GFX90A = ProgramEnvironment("2.14.0", "7.1.1", "gfx90a")


def test_kernels_tell_their_gpu(tmp_path: Path) -> None:
    body = b"".join(_KERNEL % name for name in (b"gfx90a", b"gfx1100", b"gfx90a"))
    path = _file(tmp_path / "model.mxr", body=body)
    assert read_mxr(path).architectures == ("gfx1100", "gfx90a")
    assert "was compiled for GPU architecture gfx1100, and this GPU is gfx90a" in _refusal(path, GFX90A, Target.GPU)
    own = _file(tmp_path / "own.mxr", body=_KERNEL % b"gfx90a" + _KERNEL % b"gfx9-4-generic")
    assert check_mxr(own, GFX90A, Target.GPU).architectures == ("gfx9-4-generic", "gfx90a")
    assert check_mxr(_file(tmp_path / "none.mxr"), GFX90A, Target.GPU).architectures == ()


def test_a_kernel_between_two_reads(tmp_path: Path) -> None:
    for shift in range(60):
        body = bytes((1 << 22) - 160 + shift) + _KERNEL % b"gfx90a" + bytes(10)
        assert read_mxr(_file(tmp_path / "model.mxr", body=body)).architectures == ("gfx90a",)


def test_without_offload_copy(tmp_path: Path) -> None:
    path = _file(tmp_path / "model.mxr", body=_text("main:#output_0"))
    assert check_mxr(path, GFX90A, Target.GPU).wants_output_buffers
    path = _file(tmp_path / "model.mxr", targets=("ref",), body=_text("main:#output_0"))
    assert "was compiled without offload_copy" in _refusal(path, GFX90A, Target.REF)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "MIGraphX program model.mxr is empty; copy it again"),
        (b"{}", "is damaged or not an .mxr file (it begins with byte 0x7b, which does not begin a map)"),
        (b"\x80", "(no entry 'modules')"),
        (b"\x85\xa7ver", "(it ends within a value of 7 bytes at byte 2)"),
        (b"\x81\xa7modules\x80", "(it lacks its version, MIGraphX's version or its targets)"),
        (b"\x81" + b"\x91" * 99, "(values are nested too deeply)"),
        (b"\x81\xc1\x00", "(a value of kind 0xc1)"),
        (b"\xdf\xff\xff\xff\xff" + b"\x01\x02" * 9, "(a key that is not text)"),
        (b"\x81\xa2\xff\xfe\x00", "codec can't decode"),
    ],
)
def test_files_that_are_no_program(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "model.mxr"
    path.write_bytes(content)
    assert text in _refusal(path, GFX90A, Target.GPU)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "model.mxr cannot be read: No such file" in _refusal(tmp_path / "model.mxr", GFX90A, Target.GPU)
    assert "cannot be read: Is a directory" in _refusal(tmp_path, GFX90A, Target.GPU)


def test_damaged_files_give_nothing_but_our_error(tmp_path: Path) -> None:
    chance = random.Random(3)
    whole = _file(tmp_path / "model.mxr", body=_KERNEL % b"gfx90a").read_bytes()
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 5)):
            damaged[chance.randrange(110)] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        (tmp_path / "model.mxr").write_bytes(damaged)
        try:
            check_mxr(tmp_path / "model.mxr", GFX90A, Target.GPU)
        except ServeError as error:
            assert error.code is StatusCode.INVALID_ARGUMENT
            refused += 1
    assert refused > 300


def test_what_it_was_made_from(tmp_path: Path) -> None:
    path = tmp_path / "net.mxr"
    assert sibling_model(path) is None
    (tmp_path / "model.onnx").touch()
    assert sibling_model(path) == tmp_path / "model.onnx"
    (tmp_path / "net.onnx").touch()
    assert sibling_model(path) == tmp_path / "net.onnx"
