"""The store of the response cache."""

from __future__ import annotations

from rocserve.core.datatypes import DataType
from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Tensor
from rocserve.scheduling.response_cache import CachedResponse, ResponseCache, copied_response


def entry(data: bytes) -> CachedResponse:
    response = InferResponse.of("m", "1", "id", [Tensor("Y", DataType.UINT8, (len(data),), memoryview(data))], {"a": 1})
    return copied_response(response)


def test_what_is_kept_is_a_copy() -> None:
    data = bytearray(b"abc")
    kept = copied_response(InferResponse.of("m", "1", "", [Tensor("Y", DataType.UINT8, (3,), memoryview(data))]))
    data[:] = b"xyz"
    assert kept.data[0] == b"abc"
    assert kept.nbytes > 3


def test_those_used_least_lately_go_first() -> None:
    size = entry(bytes(1000)).nbytes
    cache = ResponseCache(3 * size)
    for key in (b"1", b"2", b"3"):
        assert cache.put("m", key, entry(bytes(1000)))
    assert cache.get("m", b"1") is not None
    assert cache.put("m", b"4", entry(bytes(1000)))
    assert cache.get("m", b"2") is None
    assert all(cache.get("m", key) is not None for key in (b"1", b"3", b"4"))
    assert cache.nbytes == 3 * size


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = ResponseCache(2000)
    assert cache.put("m", b"1", entry(b"small"))
    assert not cache.put("m", b"2", entry(bytes(5000)))
    assert cache.get("m", b"1") is not None
    assert cache.get("m", b"2") is None


def test_the_same_key_again_takes_the_place_of_the_first() -> None:
    cache = ResponseCache(10_000)
    cache.put("m", b"1", entry(bytes(1000)))
    cache.put("m", b"1", entry(b"new"))
    kept = cache.get("m", b"1")
    assert kept is not None
    assert kept.data[0] == b"new"
    assert cache.nbytes == entry(b"new").nbytes


def test_owners_do_not_see_each_other_and_may_go() -> None:
    cache = ResponseCache(10_000)
    cache.put("a", b"1", entry(b"of a"))
    cache.put("b", b"1", entry(b"of b"))
    kept = cache.get("a", b"1")
    assert kept is not None
    assert kept.data[0] == b"of a"
    cache.forget("a")
    assert cache.get("a", b"1") is None
    assert cache.get("b", b"1") is not None
    assert cache.nbytes == entry(b"of b").nbytes
