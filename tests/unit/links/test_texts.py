"""Numbers of texts: the oldest is used again, unless a message that is being written needs it."""

from __future__ import annotations

import pytest

from rocserve.links.texts import SentTexts, Text


def sent(texts: SentTexts) -> Text:
    text = Text()
    texts.keep(text, texts.take_number())
    return text


def test_the_oldest_number_is_used_again() -> None:
    texts = SentTexts(3)
    first, *others = [sent(texts) for _ in range(3)]
    number = first.number
    fresh = sent(texts)
    assert (first.number, fresh.number) == (0, number)
    assert len({text.number for text in (*others, fresh)}) == len(texts) == 3


def test_a_text_that_a_message_needs_keeps_its_number() -> None:
    texts = SentTexts(2)
    pinned = [sent(texts) for _ in range(2)]
    for text in pinned:
        text.pins += 1
    assert sent(texts).number == 3
    assert [text.number for text in pinned] == [1, 2]
    for text in pinned:
        text.pins -= 1
    # What was needed once is kept, and no more.
    assert {sent(texts).number for _ in range(9)} == {1, 2, 3}


def test_a_number_that_was_not_sent_is_the_next() -> None:
    texts = SentTexts(2)
    kept, given_up = sent(texts), sent(texts)
    texts.give_up(given_up)
    assert (given_up.number, sent(texts).number, kept.number) == (0, 2, 1)


def test_an_answer_about_an_older_text_of_a_number_finds_nothing() -> None:
    texts = SentTexts(1)
    number, index = (text := sent(texts)).number, text.index
    assert texts.find(number, index) is text
    fresh = sent(texts)
    assert fresh.number == number
    assert texts.find(number, index) is None
    assert texts.find(number, fresh.index) is fresh
    assert texts.find(0, 0) is None


def test_a_garbage_collection_may_send_texts_while_one_is_sent() -> None:
    """It may answer a request that its model has dropped, in the middle of another answer."""
    texts = SentTexts(2)
    outer = Text()
    number = texts.take_number()
    inner = [sent(texts) for _ in range(5)]
    texts.keep(outer, number)
    assert outer.number == number
    assert number not in {text.number for text in inner}


@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_reader_needs_no_rule_of_its_own(most: int) -> None:
    """It keeps what came last with a number, and always finds what the sender means."""
    texts, known, meant = SentTexts(most), {}, [Text() for _ in range(2 * most)]
    for step in range(200):
        text = meant[step * step % len(meant)]
        if not text.number:
            number = texts.take_number()
            known[number] = text
            texts.keep(text, number)
        assert known[text.number] is text
    assert len(known) == most
