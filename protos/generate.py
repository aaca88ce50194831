"""Write the Python modules of the .proto files beside this script: messages, enums and their type stubs.

protoc compiles the files; the modules are written here because protoc's own would register the messages in protobuf's
default pool, where tritonclient's have the same names. No service stubs are made: the server and the client name the
methods themselves.

Usage: python protos/generate.py [OUTPUT_FOLDER]      (default: server/rocserve/protocol)
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
PACKAGE = "rocserve.protocol"
FILES = (
    "model_config.proto",
    "grpc_service.proto",
    "health.proto",
    "reflection.proto",
    "page.proto",
    "amd_config.proto",
)
"""In the order of their imports."""

_BYTES_A_LINE = 24


def main() -> None:
    default = PROTOS.parent / "server" / "rocserve" / "protocol"
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for path in generate(output):
        print(path)


def generate(output: Path) -> list[Path]:
    """Write all modules and stubs into a folder.

    Raises:
        RuntimeError: protoc refuses a file; it has said why on standard error.
    """
    version = importlib.metadata.version("grpcio-tools")
    written: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder)
        for description in _compile(stubs):
            module = module_name(description.name)
            written.append(output / f"{module}.py")
            written[-1].write_text(_module(description))
            written.append(output / f"{module}.pyi")
            written[-1].write_text(_stub((stubs / f"{module}.pyi").read_text(), description.name, version))
    return written


def module_name(proto: str) -> str:
    return proto.removesuffix(".proto") + "_pb2"


def _compile(folder: Path) -> list[FileDescriptorProto]:
    """Run protoc: type stubs into the folder, descriptors as the result."""
    descriptors = folder / "descriptors.binpb"
    bundled = importlib.resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{PROTOS}", f"-I{bundled}", f"--descriptor_set_out={descriptors}", f"--pyi_out={folder}"]
    if protoc.main([*arguments, *FILES]) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(FILES)} in {PROTOS}")
    by_name = {file.name: file for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file}
    return [by_name[name] for name in FILES]


def _module(description: FileDescriptorProto) -> str:
    """The module's text; the same for every version of grpcio-tools."""
    lines = [f'"""Made from {description.name} by protos/generate.py; do not edit."""', ""]
    lines += [f"import {PACKAGE}.{module_name(imported)}  # noqa: F401" for imported in description.dependency]
    lines += [f"from {PACKAGE} import pool as _pool", "", "DESCRIPTOR = _pool.add_file("]
    serialized = description.SerializeToString(deterministic=True)
    for start in range(0, len(serialized), _BYTES_A_LINE):
        lines.append(f"    {serialized[start : start + _BYTES_A_LINE]!r}")
    lines += [")", ""]
    for enum in description.enum_type:
        lines.append(f'{enum.name} = _pool.enum_type(DESCRIPTOR, "{enum.name}")')
        lines += [f"{value.name} = {value.number}" for value in enum.value]
    lines += [
        f'{message.name} = _pool.message_class(DESCRIPTOR, "{message.name}")' for message in description.message_type
    ]
    return "\n".join(lines) + "\n"


def _stub(text: str, proto: str, version: str) -> str:
    """protoc's stub with its imports between our modules made absolute; its wording varies with grpcio-tools."""
    absolute = re.sub(r"^import (\w+_pb2) as ", rf"from {PACKAGE} import \1 as ", text, flags=re.MULTILINE)
    return f"# Made from {proto} by protos/generate.py with grpcio-tools {version}; do not edit.\n{absolute}"


if __name__ == "__main__":
    main()
