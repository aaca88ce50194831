"""The regions that clients have registered, by their names, and how requests refer to them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeVar

from rocserve.core.errors import ServeError, StatusCode, invalid_argument, not_found
from rocserve.core.requests import SHARED_BYTE_SIZE, SHARED_OFFSET, SHARED_REGION, Parameters
from rocserve.plane.guarded_mapping import FaultGuard
from rocserve.services.client_memory.device_memory import DeviceRegion
from rocserve.services.client_memory.region import ClientRegion

_UNSIGNED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A part of a region."""

    region: str
    offset: int
    """Bytes from the region's beginning. Triton reads both numbers as unsigned ones, so a negative one is huge."""
    nbytes: int


def read_reference(tensor: str, parameters: Parameters) -> RegionReference | None:
    """Where the tensor lies; None = in the request itself.

    Raises:
        ServeError: INVALID_ARGUMENT, a parameter is of the wrong type, or lacks its fellow.
    """
    region = parameters.get(SHARED_REGION)
    if region is None:
        for name in (SHARED_OFFSET, SHARED_BYTE_SIZE):
            if name in parameters:
                raise invalid_argument(
                    f"'{name}' can not be specified without '{SHARED_REGION}' parameter for tensor '{tensor}'"
                )
        return None
    if not isinstance(region, str):
        raise _wrong_type(SHARED_REGION, tensor, "string_param")
    offset = _number(SHARED_OFFSET, tensor, parameters) if SHARED_OFFSET in parameters else 0
    if SHARED_BYTE_SIZE not in parameters:
        raise invalid_argument(
            f"'{SHARED_BYTE_SIZE}' must be specified along with '{SHARED_REGION}' parameter for tensor '{tensor}'"
        )
    return RegionReference(region, offset, _number(SHARED_BYTE_SIZE, tensor, parameters))


def _number(name: str, tensor: str, parameters: Parameters) -> int:
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, tensor, "int64_param")
    return value & _UNSIGNED


def _wrong_type(name: str, tensor: str, expected: str) -> ServeError:
    return invalid_argument(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {expected}.")


RegionKind = TypeVar("RegionKind", ClientRegion, DeviceRegion)


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of a region that a request may write to, until it is given back."""

    region: ClientRegion | DeviceRegion
    offset: int
    nbytes: int


class ClientRegions:
    """Safe on any thread: HTTP's clients register theirs on the event loop. Texts and codes are Triton's.

    A region that a request is to write to stays until that has been done, also when it is unregistered meanwhile: its
    name is taken until then, and requests may still use it.
    """

    def __init__(self, guard: FaultGuard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        """Guards the dict and the regions' marks."""
        self._regions: dict[str, ClientRegion | DeviceRegion] = {}

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Raises: ServeError: ALREADY_EXISTS, or as ClientRegion does."""
        with self._lock:
            if name in self._regions:
                raise taken(name)
            self._regions[name] = ClientRegion(name, key, offset, nbytes, self._guard)

    def add(self, region: DeviceRegion) -> None:
        """Raises: ServeError: ALREADY_EXISTS."""
        with self._lock:
            if region.name in self._regions:
                raise taken(region.name)
            self._regions[region.name] = region

    def unregister(self, name: str, kind: type[ClientRegion] | type[DeviceRegion]) -> None:
        """One of another kind, or that is not known, is passed over; all of the kind where the name is empty."""
        with self._lock:
            for region in [self._regions.get(name)] if name else list(self._regions.values()):
                if isinstance(region, kind):
                    self._leave(region)

    def registered(self, kind: type[RegionKind]) -> list[RegionKind]:
        """In the order of their names."""
        with self._lock:
            found = [region for region in self._regions.values() if isinstance(region, kind)]
        return sorted(found, key=lambda region: region.name)

    def find(self, name: str) -> ClientRegion | DeviceRegion | None:
        with self._lock:
            return self._regions.get(name)

    def read(self, reference: RegionReference) -> bytes:
        """A copy of a part of a region.

        Raises:
            ServeError: there is no such region, or no such part of it.
        """
        return self.checked(reference).read(reference.offset, reference.nbytes)

    def checked(self, reference: RegionReference) -> ClientRegion | DeviceRegion:
        """The region that a reference names, which holds the part that it names; raises as `read` does."""
        with self._lock:
            return self._checked(reference)

    def borrow(self, reference: RegionReference) -> RegionPart:
        """A part to write to, which is to be given back; raises as `read` does."""
        with self._lock:
            region = self._checked(reference)
            region.users += 1
        return RegionPart(region, reference.offset, reference.nbytes)

    def give_back(self, part: RegionPart) -> None:
        """The part is no longer written to."""
        with self._lock:
            part.region.users -= 1
            if part.region.is_leaving:
                self._leave(part.region)

    def _checked(self, reference: RegionReference) -> ClientRegion | DeviceRegion:
        region = self._regions.get(reference.region)
        if region is None:
            raise not_found(f"Unable to find shared memory region: '{reference.region}'")
        region.check_bounds(reference.offset, reference.nbytes)
        return region

    def _leave(self, region: ClientRegion | DeviceRegion) -> None:
        region.is_leaving = True
        if not region.users:
            del self._regions[region.name]


def taken(name: str) -> ServeError:
    return ServeError(StatusCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
