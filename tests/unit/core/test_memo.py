"""What is remembered up to a limit."""

from __future__ import annotations

from rocserve.core.memo import Memo


def test_the_oldest_entry_is_forgotten_when_the_memo_is_full() -> None:
    memo = Memo[str, int](2)
    assert [memo.keep(key, number) for number, key in enumerate("abc")] == [0, 1, 2]
    assert memo == {"b": 1, "c": 2}


def test_another_thread_may_change_a_full_memo_meanwhile() -> None:
    memo = Memo[object, int](2)

    class Key:
        """A key that another thread takes out just before it is forgotten."""

        is_taken = False

        def __hash__(self) -> int:
            if self.is_taken:
                self.is_taken = False
                del memo[self]
            return 1

    oldest = Key()
    memo.keep(oldest, 1)
    memo.keep("b", 2)
    oldest.is_taken = True
    memo.keep("c", 3)
    assert memo == {"b": 2, "c": 3}
