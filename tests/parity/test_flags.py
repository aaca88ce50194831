"""The names of tritonserver's flags are those that it prints."""

from __future__ import annotations

import re

import pytest
from support.parity.flags import RECORDED, recorded_flags

from benchmarks.triton_peer import TritonPeer


def test_the_recorded_flags_are_those_of_the_help(peer: TritonPeer | None, pytestconfig: pytest.Config) -> None:
    if peer is None:
        pytest.skip("no running Triton here: its record stands; --triton=live starts one")
    names = sorted(re.findall(r"^  --([a-z0-9-]+)", peer.help(), re.MULTILINE))
    if pytestconfig.getoption("triton") == "record":
        RECORDED.write_text("".join(f"{name}\n" for name in names))
    assert names == recorded_flags()
