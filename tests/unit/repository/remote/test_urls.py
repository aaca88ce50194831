"""URLs of repositories elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.core.remote_places import StoreKind, parse_remote


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
    [
        ("hf://org/model", "org/model", "main", ""),
        ("hf://org/model@v1/onnx", "org/model", "v1", "onnx"),
    ],
)
def test_hugging_face(url: str, model: str, revision: str, folder: str) -> None:
    place = parse_remote(url)
    assert (place.kind, place.bucket, place.revision, place.prefix) == (
        StoreKind.HUGGING_FACE,
        model,
        revision,
        folder,
    )


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
    ],
)
def test_other_forms_are_told_what_is_expected(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_remote(url)


@pytest.mark.parametrize("url", ["https://example.com/models.zip", "https://example.com", "https://u:secret@h/m.tar"])
def test_archives_that_are_not_taken(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|expected") as error:
        parse_remote(url)
    assert "secret" not in str(error.value)


def test_each_url_has_a_home_of_its_own(tmp_path: Path) -> None:
    homes = {parse_remote(url).home_in(tmp_path) for url in ("s3://a/b", "s3://a-b", "gs://a/b", "s3://a/b/c")}
    assert len(homes) == 4
