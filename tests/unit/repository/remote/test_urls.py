"""URLs of remote repositories; the model of each object, and which objects may become files; credentials of buckets,
where Triton and AWS look for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocserve.core.remote_places import StoreKind, parse_remote
from rocserve.repository.remote.object_store import store_options
from rocserve.repository.remote.objects import WHOLE, RemoteObject, StoreError, arrange
from rocserve.settings.repository import repository


@pytest.mark.parametrize(
    ("url", "endpoint", "bucket", "prefix"),
    [
        ("s3://bucket", "", "bucket", ""),
        ("s3://bucket/a/b/", "", "bucket", "a/b"),
        ("s3://minio:9000/bucket/a", "http://minio:9000", "bucket", "a"),
        ("s3://https://minio:9000/bucket", "https://minio:9000", "bucket", ""),
        ("s3://https://s3.example.com/bucket/a", "https://s3.example.com", "bucket", "a"),
        ("gs://bucket/a", "", "bucket", "a"),
        ("gs://http://localhost:4443/bucket", "http://localhost:4443", "bucket", ""),
        ("as://account/container/a/b", "", "container", "a/b"),
        ("as://http://localhost:10000/account/container", "http://localhost:10000", "container", ""),
    ],
)
def test_tritons_forms(url: str, endpoint: str, bucket: str, prefix: str) -> None:
    place = parse_remote(url)
    assert (place.endpoint, place.bucket, place.prefix) == (endpoint, bucket, prefix)


def test_azures_account_may_stand_as_its_host() -> None:
    assert parse_remote("as://account.blob.core.windows.net/container").account == "account"


@pytest.mark.parametrize(
    ("url", "model", "revision", "folder"),
    [("hf://org/model", "org/model", "main", ""), ("hf://org/model@v1/onnx", "org/model", "v1", "onnx")],
)
def test_hugging_face(url: str, model: str, revision: str, folder: str) -> None:
    place = parse_remote(url)
    assert (place.kind, place.bucket, place.revision, place.prefix) == (StoreKind.HUGGING_FACE, model, revision, folder)


def test_what_signs_an_archives_url_is_not_told() -> None:
    place = parse_remote("https://example.com/a/models.tar.gz?sig=secret")
    assert place.bucket.endswith("?sig=secret")
    assert place.url == "https://example.com/a/models.tar.gz"
    assert place.name == "models"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/models",
        "s3://",
        "s3://bucket/../other",
        "s3://bucket//a",
        "as://account",
        "hf://model",
        "gs://b?x=1",
        "s3:/bucket",
        "s3:bucket",
    ],
)
def test_the_error_of_another_form_says_what_is_expected(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_remote(url)


def test_a_url_with_a_slash_too_few_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected s3://BUCKET\[/PREFIX\].*, got 's3:/bucket'"):
        repository("s3:/bucket")
    monkeypatch.chdir(tmp_path)
    Path("s3:").mkdir()
    assert repository("s3:") == Path("s3:")


@pytest.mark.parametrize("url", ["https://example.com/models.zip", "https://example.com", "https://u:secret@h/m.tar"])
def test_archives_that_are_not_taken(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|expected") as error:
        parse_remote(url)
    assert "secret" not in str(error.value)


def test_each_url_has_a_home_of_its_own(tmp_path: Path) -> None:
    folders = {parse_remote(url).home_in(tmp_path) for url in ("s3://a/b", "s3://a-b", "gs://a/b", "s3://a/b/c")}
    assert len(folders) == 4


def objects(*keys: str, size: int = 1) -> list[RemoteObject]:
    return [RemoteObject(key, size, "tag") for key in keys]


def test_each_folder_is_a_unit() -> None:
    units = arrange(objects("a/config.pbtxt", "a/1/model.onnx", "b/1/model.onnx", "README.md"))
    assert {name: len(unit.objects) for name, unit in units.items()} == {"a": 2, "b": 1, WHOLE: 1}


@pytest.mark.parametrize("key", ["config.pbtxt", "1/model.onnx"])
def test_a_repository_that_is_one_model_is_one_unit(key: str) -> None:
    assert set(arrange(objects(key, "configs/other.pbtxt"))) == {WHOLE}


def test_temporary_names_and_marks_of_folders_are_left_out() -> None:
    units = arrange([*objects("a/1/model.onnx", "a/.git/x", "a/1/model.onnx.tmp"), *objects("a", "a/1", size=0)])
    assert set(units["a"].objects) == {"a/1/model.onnx"}
    assert not units["a"].refusal


def test_an_empty_file_keeps_the_folder_that_it_is_in() -> None:
    assert set(arrange(objects("a/config.pbtxt", "a/1/.gitkeep", size=0))["a"].objects) == {
        "a/config.pbtxt",
        "a/1/.gitkeep",
    }


@pytest.mark.parametrize("key", ["a/../../etc/passwd", "a//b", "a/\0", f"a/{'x' * 256}", "a/.."])
def test_what_is_no_path_within_the_folder_is_refused(key: str) -> None:
    units = arrange(objects("b/1/model.onnx", key))
    assert "not a path within a folder" in units["a"].refusal
    assert not units["b"].refusal


@pytest.mark.parametrize("key", ["../x", "/etc/passwd"])
def test_what_leads_out_belongs_to_no_model(key: str) -> None:
    units = arrange(objects("b/1/model.onnx", key))
    refused = [unit for unit in units.values() if unit.refusal]
    assert len(refused) == 1
    assert not units["b"].refusal


def test_an_object_that_is_a_folder_too_is_refused() -> None:
    assert "both an object and a folder" in arrange(objects("a/x", "a/x/y"))["a"].refusal


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


@pytest.mark.parametrize(
    ("url", "entries"),
    [
        ("s3://bucket", "null"),
        ("s3://bucket", '["s3://bucket"]'),
        ("s3://bucket", '{"": "key"}'),
        ("s3://bucket", '{"": null}'),
        ("as://account/container", '{"as://account": ["key"]}'),
        ("gs://bucket", '{"": {"key_id": "k"}}'),
    ],
)
def test_an_error_names_a_file_of_credentials_of_another_form(tmp_path: Path, url: str, entries: str) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(f'{{"{url[:2]}": {entries}}}')
    with pytest.raises(StoreError, match=r"credentials.json: expected a JSON file of credentials, got: .*; correct it"):
        store_options(parse_remote(url), {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)})


def test_azure_by_the_machines_identity_takes_no_key() -> None:
    environment = {"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_AUTH_TYPE": "managed_identity"}
    place = parse_remote("as://account/container")
    assert "account_key" not in store_options(place, environment)
    assert store_options(place, {"AZURE_STORAGE_KEY": "k"})["account_key"] == "k"
