"""Opens what a URL names."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from rocserve.core.remote_places import RemotePlace, StoreKind
from rocserve.repository.remote.archive import ArchiveSource
from rocserve.repository.remote.hub import HubSource
from rocserve.repository.remote.object_store import BucketSource
from rocserve.repository.remote.objects import StoreError
from rocserve.repository.remote.room import Room
from rocserve.repository.remote.source import Source


def open_source(place: RemotePlace, environment: Mapping[str, str], room: Room) -> Source:
    """Raises: StoreError: what it needs is not installed, or its credentials cannot be read."""
    if importlib.util.find_spec("obstore") is None:
        raise StoreError("expected the package obstore, which is not installed: pip install 'rocserve[remote]'")
    if place.kind is StoreKind.HUGGING_FACE:
        return HubSource(place, environment)
    if place.kind is StoreKind.ARCHIVE:
        return ArchiveSource(place, room)
    return BucketSource(place, environment)
