"""What the repository is told at the start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rocserve.core.model_config import InstanceKind
from rocserve.core.remote_places import RemotePlace
from rocserve.repository.single_model import SingleModel
from rocserve.settings import ControlMode, ReadinessRule

__all__ = ["ControlMode", "ReadinessRule", "RepositorySettings"]


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    roots: tuple[Path, ...]
    remotes: tuple[RemotePlace, ...] = ()
    """Whose copies are among the roots."""
    remote_cache_bytes: int | None = None
    """How much those copies may take; None = all but a tenth of the disk."""
    single: SingleModel | None = None
    """The one model that there is, in the one root; None = the roots are repositories."""
    preprocess: str = ""
    """The parameter of this name of the one model, where it was given beside it."""
    labels: Path | None = None
    """The file with the names of the classes of the one model."""
    control_mode: ControlMode = ControlMode.POLL
    poll_seconds: float = 15.0
    """How often the folders are scanned when no notification comes."""
    settle_seconds: float = 0.5
    """How long a model's files must have stayed as they are before a change counts."""
    allow_remote_files: bool = False
    """Load requests may bring files."""
    allow_remote_models: bool = False
    """Load requests with files may name models that the repositories have not."""
    allow_endpoints: bool = False
    """Clients may have files served as endpoints."""
    most_endpoints: int = 64
    """Of those at once, counted with each further instance."""
    worker_load_folders: tuple[Path, ...] = ()
    """Folders beside the repositories whose files clients may have served."""
    model_namespacing: bool = False
    """Models of different repositories may have the same name."""
    load_models: tuple[str, ...] = ()
    """What is loaded at the start in explicit mode; "*" = all."""
    may_lack_models: bool = False
    """Those that are not there any more are missed by nobody."""
    max_versions: int = 128
    """Of a model that its version policy serves at once."""
    max_folder_entries: int = 100_000
    """Files and folders of a model."""
    strict_model_config: bool = False
    """Nothing is completed from the model file."""
    model_config_name: str = ""
    """Read configs/<name>.pbtxt of a model instead of config.pbtxt."""
    default_instance_kind: InstanceKind = InstanceKind.AUTO
    """Of the instance group that a model without one gets."""
    readiness: ReadinessRule = ReadinessRule.KEPT
    ends_on_failure: bool = False
    """The server ends when a model fails as it starts, so that no such load is tried again."""
    concurrent_loads: int = 4
    long_load_seconds: float = 10.0
    """A load that compiles, and has lasted so long, is no longer counted among the concurrent ones."""
    retry_seconds: float = 1.0
    """The pause before a failed load is tried again; doubled at each failure."""
    longest_retry_seconds: float = 300.0
