"""Repository agents (model_repository_agents): what is done with a model's files before they are loaded.

There is one, Triton's `checksum`: its parameters name files and the digests that they must have.
"""

from __future__ import annotations

import hashlib

from rocserve.config.model_folder import ModelFolder
from rocserve.core.errors import invalid_argument, unimplemented
from rocserve.protocol.model_config_pb2 import ModelConfig

CHECKSUM = "checksum"
_MD5 = "md5"


def check_agents_known(message: ModelConfig) -> None:
    """Raises: ServeError INVALID_ARGUMENT: there is no such agent."""
    for agent in message.model_repository_agents.agents:
        if agent.name != CHECKSUM:
            raise invalid_argument(
                f"unable to find 'libtritonrepoagent_{agent.name}.so' for repo agent '{agent.name}'; the only agent of"
                f" rocserve is '{CHECKSUM}': prepare the files of model '{message.name}' before they are dropped"
            )


def run_agents(message: ModelConfig, folder: ModelFolder) -> None:
    """Let the agents look at the files of a model's folder.

    Raises:
        ServeError: INVALID_ARGUMENT in Triton's words: a file is not there or not what it should be; UNIMPLEMENTED:
            another kind of digest.
    """
    for agent in message.model_repository_agents.agents:
        for key, wanted in sorted(agent.parameters.items()):
            algorithm, colon, name = key.partition(":")
            if not colon:
                raise invalid_argument(f"failed to parse key: {key}; expected MD5:<path in the model's folder>")
            if algorithm.lower() != _MD5:
                raise unimplemented(f"Unsupported checksum algorithm: {algorithm}; expected MD5")
            found = _digest(name, folder)
            if found != wanted:
                raise invalid_argument(f"Mismatched MD5 hash for file {name}, expect: {wanted}, got: {found}")


def _digest(name: str, folder: ModelFolder) -> str:
    path = folder.resolve(name, f"file of agent '{CHECKSUM}'")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise invalid_argument(f"failed to open text file for read {name}: {error.strerror}") from None
