"""Parses the URLs of model repositories outside this machine."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


class StoreKind(enum.Enum):
    """Kinds of stores; the value is the URL's scheme."""

    S3 = "s3"
    GOOGLE = "gs"
    AZURE = "as"
    HUGGING_FACE = "hf"
    ARCHIVE = "https"


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """A folder of a remote store that holds models."""

    kind: StoreKind
    url: str
    """As configured, without the part from "?" on, which may be a secret."""
    bucket: str
    """Azure: the container. Hugging Face: organisation and model. Archive: the whole URL."""
    prefix: str = ""
    """The path before the models' names, without a "/" at either end."""
    endpoint: str = ""
    """URL of the store; "" = the provider's, or the one in the environment."""
    account: str = ""
    """Azure's storage account."""
    revision: str = ""
    """Hugging Face's branch, tag or commit."""
    home: Path = Path()
    """Folder of the local copy and its data; set as soon as the cache directory is known."""

    @property
    def name(self) -> str:
        """Return the name for a model that fills the whole repository and has no name in its configuration."""
        words = (self.prefix or self.url).rstrip("/").rsplit("/", 1)[-1]
        return re.sub(r"\.(tar|tgz)(\.\w+)?$", "", words).lstrip(".") or "models"

    @property
    def root(self) -> Path:
        """Return the local copy, which is served like a repository on a disk."""
        return self.home / "models" / self.name

    def home_in(self, cache: Path) -> Path:
        words = re.sub(r"[^\w.-]+", "-", self.url)[:80].strip("-.")
        return cache / "repositories" / f"{words}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"


def is_url(text: str) -> bool:
    """Return whether a repository's name is meant as a URL: `s3:/bucket` is one with a slash too few."""
    begins_as_one = re.match(rf"({'|'.join(kind.value for kind in StoreKind)}|http):", text)
    return "://" in text or bool(begins_as_one and not Path(text).exists())


def parse_remote(text: str) -> RemotePlace:
    """Parse a repository URL. Raises ValueError with the known forms if the URL has none of them."""
    scheme, _, rest = text.partition(":")
    forms = {
        StoreKind.S3: "s3://BUCKET[/PREFIX], s3://HOST:PORT/BUCKET[/PREFIX] or s3://https://HOST[:PORT]/BUCKET[/PREFIX]",
        StoreKind.GOOGLE: "gs://BUCKET[/PREFIX]",
        StoreKind.AZURE: "as://ACCOUNT/CONTAINER[/PREFIX]",
        StoreKind.HUGGING_FACE: "hf://ORGANISATION/MODEL[@REVISION][/FOLDER]",
        StoreKind.ARCHIVE: "https://HOST/PATH.tar (or .tar.gz, .tgz, .tar.bz2, .tar.xz)",
    }
    if scheme in ("http", "https"):
        address = urlsplit(text)
        if not address.hostname or not re.search(r"\.(tar|tgz|tar\.(gz|bz2|xz))$", address.path):
            raise ValueError(f"expected {forms[StoreKind.ARCHIVE]}, got '{text.partition('?')[0]}'")
        if "@" in address.netloc:
            # Without the URL itself, because everybody who lists processes would see its password.
            raise ValueError("URLs with a password are refused; let the web server allow this machine, or sign the URL")
        return RemotePlace(StoreKind.ARCHIVE, f"{address.scheme}://{address.netloc}{address.path}", text)
    kinds = {kind.value: kind for kind in StoreKind}
    if scheme not in kinds:
        raise ValueError(
            f"unknown scheme {scheme}://, expected a folder of this machine, or one of {'; '.join(forms.values())}"
        )
    kind = kinds[scheme]
    if not rest.startswith("//"):
        raise ValueError(f"expected {forms[kind]}, got '{text}'")
    rest = rest[2:]
    endpoint = ""
    found = re.fullmatch(r"(?P<scheme>https?://)?(?P<host>[^/]+?(?P<port>:\d+)?)/(?P<rest>.*)", rest)
    if found and kind is not StoreKind.HUGGING_FACE and (found["scheme"] or found["port"]):
        endpoint = (found["scheme"] or "http://") + found["host"]
        rest = found["rest"]
    parts = rest.rstrip("/").split("/")
    named = 1 if kind in (StoreKind.S3, StoreKind.GOOGLE) else 2
    if len(parts) < named or any(part in ("", ".", "..") for part in parts) or re.search(r"[?#\s]", rest):
        raise ValueError(f"expected {forms[kind]}, got '{text}'")
    url = text.rstrip("/")
    prefix = "/".join(parts[named:])
    if kind is StoreKind.AZURE:
        return RemotePlace(kind, url, parts[1], prefix, endpoint, account=parts[0].split(".")[0])
    if kind is StoreKind.HUGGING_FACE:
        model, _, revision = parts[1].partition("@")
        return RemotePlace(kind, url, f"{parts[0]}/{model}", prefix, revision=revision or "main")
    return RemotePlace(kind, url, parts[0], prefix, endpoint)
