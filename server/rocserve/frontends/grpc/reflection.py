"""Serves gRPC's reflection, v1 and v1alpha: tools without .proto files, such as grpcurl, learn the methods from it."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor

from rocserve.core.errors import ServeError, StatusCode, not_found, unimplemented
from rocserve.frontends.grpc.transport import Routes, StreamCall, StreamRoute, guarded
from rocserve.protocol import grpc_service_pb2, health_pb2
from rocserve.protocol import reflection_pb2 as pb
from rocserve.protocol.faults import parse_message
from rocserve.services.access import Restriction

METHOD = "ServerReflectionInfo"
_V1, _V1_ALPHA = "grpc.reflection.v1", "grpc.reflection.v1alpha"


def reflection_routes(restriction: Restriction | None) -> Routes:
    """Return the routes of both versions. They check the metadata first if there is a restriction."""
    files = ServedFiles()
    route = StreamRoute(lambda call: _Reflection(call, files))
    if restriction is not None:
        route = guarded(route, restriction)
    return {f"/{package}.ServerReflection/{METHOD}": route for package in (_V1, _V1_ALPHA)}


class ServedFiles:
    """The .proto files of all services of the gRPC port, and nothing else. Safe on any thread."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self.services: list[str] = []
        """Full names."""
        added: dict[str, FileDescriptor] = {}
        for file in (grpc_service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, pb.DESCRIPTOR):
            self._add(file, added)
        self._add_content(_as_v1_alpha(pb.DESCRIPTOR.serialized_pb))

    def _add(self, file: FileDescriptor, added: dict[str, FileDescriptor]) -> None:
        """Add a file after all that it imports."""
        if file.name in added:
            return
        added[file.name] = file
        for imported in file.dependencies:
            self._add(imported, added)
        self._add_content(file.serialized_pb)

    def _add_content(self, content: bytes) -> None:
        file = self._pool.AddSerializedFile(content)
        self.services += [service.full_name for service in file.services_by_name.values()]

    def named(self, name: str) -> list[bytes]:
        """Return a file and all that it imports, serialised. Raises ServeError (NOT_FOUND)."""
        try:
            return self._with_imports(self._pool.FindFileByName(name))
        except KeyError:
            raise not_found(f"there is no file '{name}'") from None

    def with_symbol(self, symbol: str) -> list[bytes]:
        """Return the file that declares a symbol, as `named` does. Raises ServeError (NOT_FOUND)."""
        # The pool does not find methods.
        service, _, method = symbol.rpartition(".")
        is_method = service in self.services and method in self._pool.FindServiceByName(service).methods_by_name
        try:
            return self._with_imports(self._pool.FindFileContainingSymbol(service if is_method else symbol))
        except KeyError:
            raise not_found(f"there is no symbol '{symbol}'") from None

    def check_message(self, name: str) -> None:
        """Raises ServeError (NOT_FOUND) if there is no message of this name."""
        try:
            self._pool.FindMessageTypeByName(name)
        except KeyError:
            raise not_found(f"there is no message '{name}'") from None

    def _with_imports(self, file: FileDescriptor) -> list[bytes]:
        found = {file.name: file}
        waiting = [file]
        while waiting:
            for imported in waiting.pop().dependencies:
                if imported.name not in found:
                    found[imported.name] = imported
                    waiting.append(imported)
        return [one.serialized_pb for one in found.values()]


def _as_v1_alpha(v1: bytes) -> bytes:
    """Return the file of the version v1alpha, whose messages are the same in another package."""
    file = descriptor_pb2.FileDescriptorProto.FromString(v1)
    file.name, file.package = "reflection_v1alpha.proto", _V1_ALPHA
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _renamed(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
    return file.SerializeToString()


def _renamed(name: str) -> str:
    return name.replace(f".{_V1}.", f".{_V1_ALPHA}.")


@dataclass(eq=False)
class _Reflection:
    """One stream of questions."""

    _call: StreamCall
    _files: ServedFiles

    def on_message(self, message: bytes) -> None:
        request = parse_message(message, pb.ServerReflectionRequest)
        response = pb.ServerReflectionResponse(valid_host=request.host, original_request=request)
        try:
            self._answer(request, response)
        except ServeError as error:
            # An error belongs to its request; the stream goes on.
            response.error_response.error_code = int(error.code)
            response.error_response.error_message = error.text
        self._call.send(response.SerializeToString())
        self._call.request_next()

    def _answer(self, request: pb.ServerReflectionRequest, response: pb.ServerReflectionResponse) -> None:
        """Raises ServeError."""
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            response.list_services_response.service.extend(
                pb.ServiceResponse(name=name) for name in sorted(self._files.services)
            )
        elif asked == "file_by_filename":
            response.file_descriptor_response.file_descriptor_proto.extend(self._files.named(request.file_by_filename))
        elif asked == "file_containing_symbol":
            files = self._files.with_symbol(request.file_containing_symbol)
            response.file_descriptor_response.file_descriptor_proto.extend(files)
        elif asked == "all_extension_numbers_of_type":
            self._files.check_message(request.all_extension_numbers_of_type)
            response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
        elif asked == "file_containing_extension":
            extension = request.file_containing_extension
            self._files.check_message(extension.containing_type)
            raise not_found(f"message '{extension.containing_type}' has no extension {extension.extension_number}")
        else:
            raise unimplemented("expected a ServerReflectionRequest that this server knows, got an unknown kind")

    def on_half_close(self) -> None:
        self._call.finish(StatusCode.OK, "")

    def on_cancel(self) -> None:
        """Does nothing: nothing is kept for the stream."""
