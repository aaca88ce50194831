"""The private descriptor pool of the messages, and their classes. Uses only public functions of the protobuf runtime:
no generated code that is tied to a runtime version, and no names in the default pool or symbol database."""

from __future__ import annotations

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

POOL = descriptor_pool.DescriptorPool()


def add_file(serialized: bytes) -> FileDescriptor:
    """Add a serialised FileDescriptorProto, after the files that it imports."""
    return POOL.AddSerializedFile(serialized)


def message_class(file: FileDescriptor, name: str) -> type[Message]:
    """Return the class of a top-level message; nested messages and enums are its attributes."""
    return _with_nested_classes(file.message_types_by_name[name])


def enum_type(file: FileDescriptor, name: str) -> EnumTypeWrapper:
    """Return a top-level enum with its names and numbers."""
    return EnumTypeWrapper(file.enum_types_by_name[name])


def _with_nested_classes(descriptor: Descriptor) -> type[Message]:
    message: type[Message] = message_factory.GetMessageClass(descriptor)
    for nested in descriptor.nested_types:
        nested_class = _with_nested_classes(nested)
        # protobuf's C runtime finds nested classes by itself; the pure Python runtime does not.
        if not hasattr(message, nested.name):
            setattr(message, nested.name, nested_class)
    return message
