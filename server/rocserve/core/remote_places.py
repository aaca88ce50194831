"""Where a model repository is that is no folder of this machine."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path


class StoreKind(enum.Enum):
    """By the URL's scheme."""

    S3 = "s3"
    GOOGLE = "gs"
    AZURE = "as"
    HUGGING_FACE = "hf"
    ARCHIVE = "https"


@dataclass(frozen=True, slots=True)
class RemotePlace:
    kind: StoreKind
    url: str
    """As it was given, but for what follows a "?", which may be a secret."""
    bucket: str
    """Azure: the container; Hugging Face: organisation and model; an archive: its whole URL."""
    prefix: str = ""
    """What lies before the models' names; without a "/" at its ends."""
    endpoint: str = ""
    """"" = the provider's own, or what the environment says."""
    account: str = ""
    """Azure's."""
    revision: str = ""
    """Hugging Face's: a branch, a tag or a commit."""
    home: Path = Path()
    """Where its copy and what belongs to that are kept; set once the cache directory is known."""

    @property
    def name(self) -> str:
        """What a model is called that is the whole repository and does not say."""
        words = (self.prefix or self.url).rstrip("/").rsplit("/", 1)[-1]
        return re.sub(r"\.(tar|tgz)(\.\w+)?$", "", words).lstrip(".") or "models"

    @property
    def root(self) -> Path:
        """The copy, which is served as a repository on a disk."""
        return self.home / "models" / self.name

    def home_in(self, cache: Path) -> Path:
        words = re.sub(r"[^\w.-]+", "-", self.url)[:80].strip("-.")
        return cache / "repositories" / f"{words}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"
