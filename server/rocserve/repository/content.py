"""What a model is to be: its definition, the files that it was read from, and the versions wanted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rocserve.config.definition import ModelDefinition
from rocserve.config.override import REQUEST_SOURCE
from rocserve.config.versions import select_versions
from rocserve.core.model_names import qualified
from rocserve.repository.private_folder import PrivateFolder
from rocserve.repository.scan import ModelScan


@dataclass(frozen=True, slots=True)
class ModelContent:
    definition: ModelDefinition
    scan: ModelScan
    wanted: frozenset[int]
    """The versions that the version policy serves."""
    shared_key: str
    """Tells what all versions depend on: folder, files, configuration but for the version policy."""
    private_folder: PrivateFolder | None = None
    """Where its files are when that is not the repository; it lasts as long as this content."""

    @property
    def model(self) -> str:
        """The model's key within the server."""
        return qualified(self.scan.namespace, self.definition.name)

    @property
    def is_of_request(self) -> bool:
        """Whether its configuration came whole, in a load request, and not from a file."""
        return self.definition.source == REQUEST_SOURCE

    def key(self, version: int) -> str:
        """Two contents with the same key load the same version."""
        return f"{self.shared_key} {version} {self.scan.versions[version].files.fingerprint}"


def make_content(
    definition: ModelDefinition, scan: ModelScan, private_folder: PrivateFolder | None = None
) -> ModelContent:
    wanted = frozenset(select_versions(definition.config.version_policy, scan.versions))
    return ModelContent(definition, scan, wanted, _shared_key(definition, scan), private_folder)


def _shared_key(definition: ModelDefinition, scan: ModelScan) -> str:
    # The message, not the file's bytes: a comment is no change, and an override has no file.
    message = type(definition.message)()
    message.CopyFrom(definition.message)
    message.ClearField("version_policy")
    digest = hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16)
    digest.update(f"\0{scan.folder}\0{scan.other_files}".encode(errors="surrogateescape"))
    return digest.hexdigest()
