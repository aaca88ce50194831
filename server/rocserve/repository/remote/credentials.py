"""What a bucket's store is opened with: Triton's file of credentials, its environment variables, and AWS's profiles.

All else of the providers' usual chains (roles of machines, pods and containers, tokens of workload identities) the
library finds by itself.
"""

from __future__ import annotations

import configparser
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocserve.core.remote_places import RemotePlace, StoreKind
from rocserve.repository.remote.objects import StoreError

_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"

Options = dict[str, Any]


def store_options(place: RemotePlace, environment: Mapping[str, str]) -> Options:
    """Raises: StoreError: a file that is to hold credentials cannot be read."""
    given = _from_file(place, environment)
    match place.kind:
        case StoreKind.S3:
            return _s3(place, given, environment)
        case StoreKind.GOOGLE:
            return _google(place, given, environment)
        case _:
            return _azure(place, given, environment)


def _from_file(place: RemotePlace, environment: Mapping[str, str]) -> Any:
    """What Triton's file says: that of the longest name which the URL begins with; None without the file."""
    if not (path := environment.get(_FILE)):
        return None
    try:
        entries = json.loads(Path(path).read_text()).get(place.kind.value, {})
        names = [name for name in entries if place.url.startswith(name)]
        return entries[max(names, key=len)] if names else None
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"{_FILE}={path}: expected a JSON file of credentials, came: {error}; mend it") from None


def _s3(place: RemotePlace, given: Any, environment: Mapping[str, str]) -> Options:
    given = given or {}
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
    return {"bucket": place.bucket} | _without_empty(options)


def _profile(name: str, environment: Mapping[str, str]) -> Options:
    """The keys and the region that `aws configure` has written for a profile."""
    home = Path(environment.get("HOME", "/"))
    credentials = environment.get("AWS_SHARED_CREDENTIALS_FILE", home / ".aws/credentials")
    config = environment.get("AWS_CONFIG_FILE", home / ".aws/config")
    found = configparser.RawConfigParser()
    try:
        found.read((credentials, config))
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise StoreError(f"expected AWS's files of credentials in {credentials} and {config}, came: {error}") from None
    sections = [found[section] for section in (f"profile {name}", name) if section in found]
    profile = {key: value for section in sections for key, value in section.items()}
    names = {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
        "region": "region",
        "endpoint": "endpoint_url",
    }
    return _without_empty({option: profile.get(key) for option, key in names.items()})


def _google(place: RemotePlace, given: Any, environment: Mapping[str, str]) -> Options:
    options = {"application_credentials": given or environment.get("GOOGLE_APPLICATION_CREDENTIALS")}
    # What Google's own clients and the emulators call it.
    host = place.endpoint or environment.get("STORAGE_EMULATOR_HOST", "")
    if host:
        options["base_url"] = host if "://" in host else f"http://{host}"
        options["skip_signature"] = not options["application_credentials"]
    return {"bucket": place.bucket} | _without_empty(options)


def _azure(place: RemotePlace, given: Any, environment: Mapping[str, str]) -> Options:
    given = given or {}
    kind = given.get("auth_type") or environment.get("AZURE_STORAGE_AUTH_TYPE", "")
    options = {
        "account_name": given.get("account_str") or place.account or environment.get("AZURE_STORAGE_ACCOUNT"),
        "client_id": given.get("client_id") or environment.get("AZURE_STORAGE_CLIENT_ID"),
        "endpoint": place.endpoint and f"{place.endpoint}/{place.account}",
    }
    if kind not in ("managed_identity", "default"):
        options["account_key"] = given.get("account_key") or environment.get("AZURE_STORAGE_KEY")
    return {"container_name": place.bucket} | _without_empty(options)


def _without_empty(options: Options) -> Options:
    return {name: value for name, value in options.items() if value}
