"""Archives on web servers: what is accepted, and what is refused."""

from __future__ import annotations

import os
import random
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.web_stores import WebServer, tar_of

from rocserve.core.remote_places import parse_remote
from rocserve.repository.remote.copy import CopyRoom
from rocserve.repository.remote.objects import ObjectChanged, StoreError
from rocserve.repository.remote.web_sources import ArchiveSource

FILES = {"m/1/model.onnx": b"model", "m/config.pbtxt": b"config", "m/.git/x": b"no"}


def source_of(web: WebServer, home: Path) -> ArchiveSource:
    return ArchiveSource(replace(parse_remote(f"{web.url}/a/models.tar.gz"), home=home), CopyRoom(home, None))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
async def test_its_files_are_objects(web: WebServer, tmp_path: Path, mode: str) -> None:
    web.files["/a/models.tar.gz"] = tar_of(FILES, tarfile.TarInfo("m/empty"), mode=mode)
    source = source_of(web, tmp_path)
    items = {item.key: item for item in await source.listing()}
    assert set(items) == {"m/1/model.onnx", "m/config.pbtxt", "m/empty"}
    file = tmp_path / "file"
    await source.fetch(items["m/1/model.onnx"], file, lambda _: None)
    assert file.read_bytes() == b"model"


async def test_another_archive_has_other_tags_where_files_differ(web: WebServer, tmp_path: Path) -> None:
    web.files["/a/models.tar.gz"] = tar_of(FILES)
    source = source_of(web, tmp_path)
    before = {item.key: item.tag for item in await source.listing()}
    web.files["/a/models.tar.gz"] = tar_of({**FILES, "m/1/model.onnx": b"other"})
    after = {item.key: item.tag for item in await source.listing()}
    assert [key for key in before if before[key] != after[key]] == ["m/1/model.onnx"]


async def test_a_restart_unpacks_nothing_again(web: WebServer, tmp_path: Path) -> None:
    web.files["/a/models.tar.gz"] = tar_of(FILES)
    items = await source_of(web, tmp_path).listing()
    inodes = {file.name: file.stat().st_ino for file in (tmp_path / "unpacked").iterdir()}
    assert list(await source_of(web, tmp_path).listing()) == list(items)
    assert {file.name: file.stat().st_ino for file in (tmp_path / "unpacked").iterdir()} == inodes


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("files", "more"),
    [
        ({"../outside": b"x"}, ()),
        ({"m/../../outside": b"x"}, ()),
        ({"/tmp/outside": b"x"}, ()),
        ({}, (link("m/outside", "/etc/passwd"),)),
        ({}, (link("m/outside", "m/config.pbtxt", tarfile.LNKTYPE),)),
        ({}, (link("m/outside", "", tarfile.FIFOTYPE),)),
    ],
)
async def test_members_that_lead_out_are_refused(
    web: WebServer, tmp_path: Path, files: dict[str, bytes], more: tuple[tarfile.TarInfo, ...]
) -> None:
    web.files["/a/models.tar.gz"] = tar_of(FILES)
    source = source_of(web, tmp_path)
    before = await source.listing()
    web.files["/a/models.tar.gz"] = tar_of({**FILES, **files}, *more)
    with pytest.raises(StoreError, match=r"expected files and folders in .*, got: .*outside"):
        await source.listing()
    assert "outside" not in str([names for _, *names in os.walk(tmp_path)])
    web.files["/a/models.tar.gz"] = tar_of(FILES)
    assert list(await source.listing()) == list(before)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _: b"<html>Sign in</html>"])
async def test_what_is_no_whole_archive_is_refused(web: WebServer, tmp_path: Path, damage) -> None:
    web.files["/a/models.tar.gz"] = damage(tar_of({"m/1/model.onnx": bytes(range(256)) * 1000}))
    with pytest.raises(StoreError, match=r"expected a tar archive in 'models\.tar\.gz'"):
        await source_of(web, tmp_path).listing()


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("values", [256, 16])
async def test_an_archive_that_is_damaged_within_a_file_is_refused(
    web: WebServer, tmp_path: Path, mode: str, values: int
) -> None:
    """Incompressible data lies in the archive unchanged, so that only a checksum shows the damage."""
    content = bytes(byte % values for byte in random.Random(7).randbytes(1_000_000))
    data = bytearray(tar_of({"m/1/model.onnx": content}, mode=mode))
    middle = len(data) // 2
    data[middle : middle + 4000] = bytes(4000)
    web.files["/a/models.tar.gz"] = bytes(data)
    with pytest.raises(StoreError, match=r"expected a tar archive in 'models\.tar\.gz'"):
        await source_of(web, tmp_path).listing()


async def test_an_archive_that_grows_without_end_finds_no_room(web: WebServer, tmp_path: Path) -> None:
    web.files["/a/models.tar.gz"] = tar_of({"m/zeros": bytes(10_000_000)})
    place = replace(parse_remote(f"{web.url}/a/models.tar.gz"), home=tmp_path)
    with pytest.raises(StoreError, match="room for the 10000000 bytes"):
        await ArchiveSource(place, CopyRoom(tmp_path, 1_000_000)).listing()


async def test_an_error_has_the_status_of_a_missing_archive(web: WebServer, tmp_path: Path) -> None:
    with pytest.raises(ObjectChanged, match="404"):
        await source_of(web, tmp_path).listing()
