"""Credentials of buckets, where Triton and AWS look for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocserve.core.remote_places import parse_remote
from rocserve.repository.remote.object_store import store_options
from rocserve.repository.remote.objects import StoreError


def test_aws_keys_of_the_environment_go_before_a_profile(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = b\n[other]\naws_access_key_id = c\n"
    )
    (tmp_path / ".aws/config").write_text("[profile other]\nregion = eu-west-1\n")
    place = parse_remote("s3://bucket")
    home = {"HOME": str(tmp_path)}
    assert store_options(place, home)["access_key_id"] == "a"
    other = store_options(place, home | {"AWS_PROFILE": "other"})
    assert (other["access_key_id"], other["region"]) == ("c", "eu-west-1")
    # obstore reads them itself.
    assert "access_key_id" not in store_options(place, home | {"AWS_ACCESS_KEY_ID": "d"})


def test_the_longest_name_of_tritons_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    keys = {name: {"key_id": name, "secret_key": "s"} for name in ("", "s3://bucket", "s3://bucket/a")}
    file.write_text(json.dumps({"s3": keys, "gs": {"": "/google.json"}, "as": {"": {"account_key": "k"}}}))
    environment = {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)}

    def options(url: str) -> dict[str, object]:
        return store_options(parse_remote(url), environment)

    assert options("s3://bucket/a/b")["access_key_id"] == "s3://bucket/a"
    assert options("s3://bucket/c")["access_key_id"] == "s3://bucket"
    assert "access_key_id" not in options("s3://other") or options("s3://other")["access_key_id"] == ""
    assert options("gs://bucket")["application_credentials"] == "/google.json"
    assert options("as://account/container")["account_key"] == "k"


def test_a_file_of_credentials_that_is_none_is_named(tmp_path: Path) -> None:
    environment = {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "none.json")}
    with pytest.raises(StoreError, match=r"TRITON_CLOUD_CREDENTIAL_PATH=.*none.json: expected a JSON file"):
        store_options(parse_remote("s3://bucket"), environment)


def test_azure_by_the_machines_identity_takes_no_key() -> None:
    environment = {"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_AUTH_TYPE": "managed_identity"}
    place = parse_remote("as://account/container")
    assert "account_key" not in store_options(place, environment)
    assert store_options(place, {"AZURE_STORAGE_KEY": "k"})["account_key"] == "k"
