"""Reads the URLs of repositories elsewhere, in the forms that Triton has."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from rocserve.core.remote_places import RemotePlace, StoreKind

_FORMS = {
    StoreKind.S3: "s3://BUCKET[/PREFIX], s3://HOST:PORT/BUCKET[/PREFIX] or s3://https://HOST[:PORT]/BUCKET[/PREFIX]",
    StoreKind.GOOGLE: "gs://BUCKET[/PREFIX]",
    StoreKind.AZURE: "as://ACCOUNT/CONTAINER[/PREFIX]",
    StoreKind.HUGGING_FACE: "hf://ORGANISATION/MODEL[@REVISION][/FOLDER]",
    StoreKind.ARCHIVE: "https://HOST/PATH.tar (or .tar.gz, .tgz, .tar.bz2, .tar.xz)",
}
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz))$")
_ENDPOINT = re.compile(r"(?P<scheme>https?://)?(?P<host>[^/]+?(?P<port>:\d+)?)/(?P<rest>.*)")


def parse_remote(text: str) -> RemotePlace:
    """Raises: ValueError: it is none of the forms; the text says which there are."""
    scheme, _, rest = text.partition("://")
    if scheme in ("http", "https"):
        return _archive(text)
    kinds = {kind.value: kind for kind in StoreKind}
    if scheme not in kinds:
        raise ValueError(
            f"{scheme}:// is not known, expected a folder of this machine, or one of {'; '.join(_FORMS.values())}"
        )
    kind = kinds[scheme]
    endpoint = ""
    found = _ENDPOINT.fullmatch(rest)
    if found and kind is not StoreKind.HUGGING_FACE and (found["scheme"] or found["port"]):
        endpoint = (found["scheme"] or "http://") + found["host"]
        rest = found["rest"]
    parts = rest.rstrip("/").split("/")
    named = 1 if kind in (StoreKind.S3, StoreKind.GOOGLE) else 2
    if len(parts) < named or any(part in ("", ".", "..") for part in parts) or re.search(r"[?#\s]", rest):
        raise ValueError(f"expected {_FORMS[kind]}, got '{text}'")
    url = text.rstrip("/")
    prefix = "/".join(parts[named:])
    if kind is StoreKind.AZURE:
        return RemotePlace(kind, url, parts[1], prefix, endpoint, account=parts[0].split(".")[0])
    if kind is StoreKind.HUGGING_FACE:
        model, _, revision = parts[1].partition("@")
        return RemotePlace(kind, url, f"{parts[0]}/{model}", prefix, revision=revision or "main")
    return RemotePlace(kind, url, parts[0], prefix, endpoint)


def _archive(text: str) -> RemotePlace:
    parts = urlsplit(text)
    if not parts.hostname or not _ARCHIVE.search(parts.path):
        raise ValueError(f"expected {_FORMS[StoreKind.ARCHIVE]}, got '{text.partition('?')[0]}'")
    if "@" in parts.netloc:
        # Not the text itself: everybody who lists processes sees it.
        raise ValueError(
            "a URL with a password in it is not taken; have its server allow this machine, or sign the URL"
        )
    return RemotePlace(StoreKind.ARCHIVE, f"{parts.scheme}://{parts.netloc}{parts.path}", text)
