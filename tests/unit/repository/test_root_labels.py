from __future__ import annotations

from pathlib import Path

from rocserve.core.remote_places import RemotePlace, StoreKind
from rocserve.repository.model_repository import root_labels
from rocserve.settings import RepositorySettings


def labels(*roots: str, remotes: tuple[RemotePlace, ...] = ()) -> list[str]:
    folders = tuple(map(Path, roots)) + tuple(place.root for place in remotes)
    return list(root_labels(RepositorySettings(roots=folders, remotes=remotes)).values())


def test_labels_are_as_short_as_tells_repositories_apart() -> None:
    assert labels("/srv/a") == []
    assert labels("/srv/a", "/srv/a") == []
    assert sorted(labels("/srv/a", "/srv/b")) == ["a", "b"]
    assert sorted(labels("/x/one/models", "/x/other/models", "/x/last")) == ["last", "one/models", "other/models"]
    assert sorted(labels("/models", "/srv/models")) == ["/models", "srv/models"]


def test_a_remote_repository_is_named_by_its_url() -> None:
    place = RemotePlace(StoreKind.S3, "s3://bucket/models", "bucket", "models", home=Path("/var/cache/x"))
    assert sorted(labels("/srv/models", remotes=(place,))) == ["models", "s3://bucket/models"]
