"""Remote repositories in buckets: Amazon S3 and compatible stores, Google and Azure storage, all through obstore. A
store is opened with Triton's credentials file, environment variables and AWS profiles. obstore finds the providers'
other credentials: roles of machines, pods and containers, and tokens of workload identities."""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocserve.config.model_folder import is_version_name
from rocserve.core.remote_places import RemotePlace, StoreKind
from rocserve.repository.remote.objects import Note, ObjectChanged, RemoteObject, Result, Source, StoreError, run_all

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHUNK_BYTES = 8 << 20
"""Bytes of one range request: S3 delivers some 100 MB/s per request, whatever its size."""
_CLIENT: Mapping[str, Any] = {"connect_timeout": "5s", "read_timeout": "20s", "timeout": "1d", "allow_http": True}
"""A request may take up to a day, as long as data keeps coming."""
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
"""Retries within one scan; the next scan tries again."""

_ADVICE = {
    StoreKind.S3: "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role",
    StoreKind.GOOGLE: "GOOGLE_APPLICATION_CREDENTIALS or the machine's service account",
    StoreKind.AZURE: "AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY or the machine's identity",
    StoreKind.HUGGING_FACE: "HF_TOKEN",
    StoreKind.ARCHIVE: "the URL",
}


class BucketSource(Source):
    def __init__(self, place: RemotePlace, environment: Mapping[str, str]) -> None:
        self._place = place
        from obstore.store import AzureStore, GCSStore, S3Store

        kinds: dict[StoreKind, Any] = {StoreKind.S3: S3Store, StoreKind.GOOGLE: GCSStore, StoreKind.AZURE: AzureStore}
        options = {**store_options(place, environment), "client_options": _CLIENT, "retry_config": _RETRIES}
        self._store = _open(place, lambda: kinds[place.kind](**options))
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        # Eight requests at the same time have at most 64 MiB of parts in memory.
        self._requests = asyncio.Semaphore(8)

    async def listing(self, folder: str = "") -> Sequence[RemoteObject]:
        import obstore

        where = (self._prefix + folder).rstrip("/")

        async def pages() -> list[RemoteObject]:
            found = obstore.list(self._store, where or None)
            return [_object(self._prefix, meta) async for page in found for meta in page]

        return await with_store_errors(self._place, "a listing", pages())

    async def fetch(self, item: RemoteObject, file: Path, note: Note) -> None:
        with file.open("wb") as opened:
            begins = range(0, item.size, CHUNK_BYTES)
            ends = (min(item.size, begin + CHUNK_BYTES) for begin in begins)
            await run_all(self._part(item, *part, opened.fileno(), note) for part in zip(begins, ends, strict=True))

    async def is_gone(self, key: str) -> bool:
        import obstore

        try:
            await with_store_errors(self._place, f"'{key}'", obstore.head_async(self._store, self._prefix + key))
        except ObjectChanged:
            return True
        return False

    async def _part(self, item: RemoteObject, begin: int, end: int, file: int, note: Note) -> None:
        import obstore

        async def get() -> bytes:
            options: Any = {"range": (begin, end), "if_match": f'"{item.tag}"'}
            result = await obstore.get_async(self._store, self._prefix + item.key, options=options)
            if (tag := _tag(result.meta)) != item.tag:
                raise ObjectChanged(f"expected '{item.key}' with etag {item.tag}, got {tag}")
            return bytes(await result.bytes_async())

        async with self._requests:
            data = await with_store_errors(self._place, f"'{item.key}'", get())
        if len(data) != end - begin:
            raise ObjectChanged(f"expected {end - begin} bytes of '{item.key}', got {len(data)}")
        os.pwrite(file, data, begin)
        note(len(data))


def http_store(place: RemotePlace, url: str, headers: Mapping[str, str]) -> ObjectStore:
    """Open a web server as a store. Raises StoreError."""
    from obstore.store import HTTPStore

    client: Any = {**_CLIENT, "default_headers": dict(headers)}
    return _open(place, lambda: HTTPStore(url, client_options=client, retry_config=_RETRIES))


def _open(place: RemotePlace, make: Callable[[], ObjectStore]) -> ObjectStore:
    try:
        return make()
    # obstore has no common error for wrong options.
    except Exception as error:
        text = f"cannot open the store: {_error_text(error)}; check {_ADVICE[place.kind]}"
        raise StoreError(text) from None


def _object(prefix: str, meta: Any) -> RemoteObject:
    key = meta["path"].removeprefix(prefix)
    if not meta["size"] and is_version_name(key.rpartition("/")[2]):
        # Consoles create an empty object for a folder, and obstore removes the "/" at its end.
        key += "/.folder"
    return RemoteObject(key, meta["size"], _tag(meta), meta["last_modified"].timestamp())


def _tag(meta: Any) -> str:
    """Return the etag without the quotes that stores add in some of their responses only."""
    return (meta["e_tag"] or "").strip('"')


async def with_store_errors(place: RemotePlace, expected: str, asked: Awaitable[Result]) -> Result:
    """Await a store's result, and raise StoreError instead of any other error."""
    from obstore.exceptions import InvalidPathError, PermissionDeniedError, PreconditionError, UnauthenticatedError

    try:
        return await asked
    except StoreError:
        raise
    except (FileNotFoundError, PreconditionError) as error:
        raise ObjectChanged(
            f"expected {expected}, got: {_error_text(error)}; the object was removed or replaced"
        ) from None
    except InvalidPathError as error:
        raise StoreError(
            f"expected object names that are paths, got: {_error_text(error)}; rename or remove that object"
        ) from None
    # A malformed response may raise any error.
    except Exception as error:
        words = _error_text(error)
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or re.search(
            r"(Error|code:) 40[13]\b", words
        )
        advice = "the server will retry"
        if denied:
            advice = f"check {_ADVICE[place.kind]}, and its rights to list and read"
        elif re.search(r"404 Not Found|(Error|code:) 404\b", words):
            # Stores list a prefix without objects, but no bucket that does not exist.
            advice = "check the URL's bucket, which the store does not have"
        if "RequestTimeTooSkewed" in words:
            # S3 refuses requests whose signing time differs too much from its clock.
            advice = "set this machine's clock, or the store's"
        raise StoreError(f"expected {expected}, got: {words}; {advice}") from None


def _error_text(error: Exception) -> str:
    """Return an error's text in one line, without durations and URL queries, so that equal errors have equal texts."""
    text = str(error).split("\n\nDebug source")[0]
    text = re.sub(r"\?[^\s\"']+", "", text)
    text = re.sub(r" in [\d.]+\w*s(, after \d+ retries)?(, max_retries: \d+, retry_timeout: \w+)?\b", "", text)
    if body := re.search(r"<Code>(.*?)</Code>.*?(?:<Message>(.*?)</Message>)?", text, re.DOTALL):
        text = f"{text[: text.find('<')].strip().rstrip(':')}: {body[1]}"
    return " ".join(text.split()).rstrip(": ")


_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"

Options = dict[str, Any]


def store_options(place: RemotePlace, environment: Mapping[str, str]) -> Options:
    """Return the options that open a store. Raises StoreError if a credentials file cannot be read."""
    form, options_of = {StoreKind.S3: (dict, _s3), StoreKind.GOOGLE: (str, _google), StoreKind.AZURE: (dict, _azure)}[
        place.kind
    ]
    given: Any = form()
    if path := environment.get(_FILE):
        # In Triton's file the entry with the longest name that begins the URL applies.
        try:
            entries = json.loads(Path(path).read_text()).get(place.kind.value, {})
            names = [name for name in entries if place.url.startswith(name)]
            given = entries[max(names, key=len)] if names else given
            if not isinstance(given, form):
                raise ValueError(f"{type(given).__name__} for {place.url} instead of {form.__name__}")
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise StoreError(f"{_FILE}={path}: expected a JSON file of credentials, got: {error}; correct it") from None
    return {name: value for name, value in options_of(place, given, environment).items() if value}


def _s3(place: RemotePlace, given: Any, environment: Mapping[str, str]) -> Options:
    options = {
        "access_key_id": given.get("key_id"),
        "secret_access_key": given.get("secret_key"),
        "session_token": given.get("session_token"),
        "region": given.get("region"),
    }
    if not options["access_key_id"] and (given.get("profile") or "AWS_ACCESS_KEY_ID" not in environment):
        options |= _profile(given.get("profile") or environment.get("AWS_PROFILE", "default"), environment)
    if not (options["region"] or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        options["region"] = "us-east-1"
    if place.endpoint:
        options["endpoint"] = place.endpoint
    return {"bucket": place.bucket, **options}


def _profile(name: str, environment: Mapping[str, str]) -> Options:
    """Return the keys, the region and the endpoint of a profile, as `aws configure` writes them."""
    home = Path(environment.get("HOME", "/"))
    credentials = environment.get("AWS_SHARED_CREDENTIALS_FILE", home / ".aws/credentials")
    config = environment.get("AWS_CONFIG_FILE", home / ".aws/config")
    found = configparser.RawConfigParser()
    try:
        found.read((credentials, config))
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise StoreError(f"expected AWS credentials in {credentials} and {config}, got: {error}") from None
    sections = [found[section] for section in (f"profile {name}", name) if section in found]
    profile = {key: value for section in sections for key, value in section.items()}
    names = {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
        "region": "region",
        "endpoint": "endpoint_url",
    }
    return {option: profile[key] for option, key in names.items() if profile.get(key)}


def _google(place: RemotePlace, given: Any, environment: Mapping[str, str]) -> Options:
    options = {"application_credentials": given or environment.get("GOOGLE_APPLICATION_CREDENTIALS")}
    # The variable of Google's own clients and emulators.
    host = place.endpoint or environment.get("STORAGE_EMULATOR_HOST", "")
    if host:
        options["base_url"] = host if "://" in host else f"http://{host}"
        options["skip_signature"] = not options["application_credentials"]
    return {"bucket": place.bucket, **options}


def _azure(place: RemotePlace, given: Any, environment: Mapping[str, str]) -> Options:
    kind = given.get("auth_type") or environment.get("AZURE_STORAGE_AUTH_TYPE", "")
    options = {
        "account_name": given.get("account_str") or place.account or environment.get("AZURE_STORAGE_ACCOUNT"),
        "client_id": given.get("client_id") or environment.get("AZURE_STORAGE_CLIENT_ID"),
        "endpoint": place.endpoint and f"{place.endpoint}/{place.account}",
    }
    if kind not in ("managed_identity", "default"):
        options["account_key"] = given.get("account_key") or environment.get("AZURE_STORAGE_KEY")
    return {"container_name": place.bucket, **options}
