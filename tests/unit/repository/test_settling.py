from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocserve.repository.settling import Settling

SETTLE = 1.0


def test_a_change_counts_at_the_second_look_after_the_settle_time() -> None:
    settling = Settling(SETTLE)
    assert settling.observe(0.0, 0.1, {"m": "a"}) == set()
    assert settling.due() == 1.1
    assert settling.observe(1.0, 1.05, {"m": "a"}) == set(), "the looks are 0.9 s apart"
    assert settling.observe(1.1, 1.2, {"m": "a"}) == {"m"}
    assert settling.due() is None
    assert settling.observe(5.0, 5.1, {"m": "a"}) == set(), "it counts once"


def test_each_further_change_begins_the_wait_anew() -> None:
    settling = Settling(SETTLE)
    for step in range(20):
        assert settling.observe(step * 0.5, step * 0.5, {"m": step}) == set()
    assert settling.observe(10.5, 10.5, {"m": 19}) == {"m"}


def test_away_and_back_within_the_settle_time_is_no_change() -> None:
    settling = Settling(SETTLE)
    settling.accept("m", "a")
    assert settling.observe(1.0, 1.0, {}) == set()
    assert settling.unsettled == {"m"}
    assert settling.observe(1.5, 1.5, {"m": "a"}) == set()
    assert settling.unsettled == frozenset()
    assert settling.observe(9.0, 9.0, {"m": "a"}) == set()


def test_away_for_the_settle_time_is_a_change() -> None:
    settling = Settling(SETTLE)
    settling.accept("m", "a")
    settling.observe(1.0, 1.0, {})
    assert settling.observe(2.0, 2.0, {}) == {"m"}
    assert settling.observe(3.0, 3.0, {}) == set()


def test_reopened_counts_again_though_it_is_the_same() -> None:
    settling = Settling(SETTLE)
    settling.accept("m", "a")
    settling.reopen(["m"])
    settling.observe(0.0, 0.0, {"m": "a"})
    assert settling.observe(1.0, 1.0, {"m": "a"}) == {"m"}
    settling.reopen(["m"])
    settling.observe(2.0, 2.0, {})
    assert settling.observe(3.0, 3.0, {}) == {"m"}, "gone while it was open"


LOOKS = st.lists(
    st.tuples(
        st.floats(0.01, 1.5),
        st.floats(0.0, 0.3),
        st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 2)),
    ),
    max_size=30,
)


@given(LOOKS)
def test_what_counts_was_the_same_for_the_settle_time_and_ends_as_it_is(looks: list[tuple[float, float, dict]]) -> None:
    settling = Settling(SETTLE)
    now = 0.0
    history: list[tuple[float, float, dict]] = []
    acted: dict[str, int] = {}
    for gap, duration, seen in looks:
        began, now = now + gap, now + gap + duration
        history.append((began, now, seen))
        for name in settling.observe(began, now, seen):
            assert acted.get(name) != seen.get(name), "nothing changed"
            steady = [
                (start, end)
                for index, (start, end, _) in enumerate(history)
                if all(later.get(name) == seen.get(name) for _, _, later in history[index:])
            ]
            assert began - steady[0][1] >= SETTLE
            acted = {**acted, name: seen[name]} if name in seen else {k: v for k, v in acted.items() if k != name}
        assert all(due > 0 for due in [settling.due() or 1.0])
    if not looks:
        return
    last = looks[-1][2]
    settling.observe(now + 5, now + 5, last)
    for name in settling.observe(now + 10, now + 10, last):
        assert acted.get(name) != last.get(name)
        acted = {**acted, name: last[name]} if name in last else {k: v for k, v in acted.items() if k != name}
    assert acted == last or settling.unsettled == frozenset()
    assert settling.due() is None
