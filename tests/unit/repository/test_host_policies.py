"""Host policies: names on the command line for CPU cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.repository.machine import HostPolicies, parse_cores

CORE = min(os.sched_getaffinity(0))


def fault(policies: HostPolicies, name: str) -> ServeError:
    with pytest.raises(ServeError) as raised:
        policies.cores(name)
    return raised.value


def test_cores_are_ranges() -> None:
    assert parse_cores("0-2,8-8") == {0, 1, 2, 8}
    assert HostPolicies([("p", "cpu-cores", f"{CORE}-{CORE}")]).cores("p") == [CORE]


def test_a_policy_that_nobody_gave_is_any_core() -> None:
    assert HostPolicies([("p", "cpu-cores", "0-0")]).cores("q") == ()


@pytest.mark.parametrize("text", ["3", "a-b", "4-2", "-1", "0-1,", ""])
def test_what_is_no_range(text: str) -> None:
    error = fault(HostPolicies([("p", "cpu-cores", text)]), "p")
    assert error.code is StatusCode.INVALID_ARGUMENT
    assert error.text.startswith(
        "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got "
    )


def test_cores_that_are_not_there() -> None:
    error = fault(HostPolicies([("p", "cpu-cores", "60000-60001")]), "p")
    assert error.code is StatusCode.INTERNAL
    assert error.text.startswith(
        "Unable to set NUMA thread affinity: host policy 'p' names the cores 60000,60001, of which this process may use"
    )


def test_the_cores_of_a_numa_node(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{CORE},60000-60003\n")
    policies = HostPolicies([("p", "numa-node", "1"), ("q", "numa-node", "2"), ("r", "numa-node", "x")], tmp_path)
    assert policies.cores("p") == [CORE]
    assert fault(policies, "q").text == (
        "Unable to set NUMA memory policy: this machine has no NUMA node 2; it has node1"
    )
    assert fault(policies, "r").text == "host policy setting 'numa-node' is the number of a NUMA node. Got x"
