"""Numbers for texts that many exchanges of a link share: heads of requests and answers, layouts of tensors.

A number names the text that was last sent with it, in the order of one ring. So the sender alone decides which texts
are remembered: it reuses the number of its oldest text. The reader keeps a dict, and never forgets a text too soon.
"""

from __future__ import annotations

REMEMBERED = 1024
"""Texts that a ring's ends remember: each length of a string, for example, has one."""
LARGEST_REMEMBERED = 32 << 10
"""Bytes of the text of a request or a batch. A larger one, as of thousands of parameters, is number 0: it is sent just
before the entries that need it."""


class Text:
    """The sender's record of a text."""

    __slots__ = ("index", "number", "pins")

    def __init__(self) -> None:
        self.number = 0
        """0 = the reader does not know the text, or no longer knows it."""
        self.index = 0
        """Counts the numbers given, to recognise an answer about an older text of the same number."""
        self.pins = 0
        """Messages that are being written and need the number."""


class SentTexts:
    """Gives the texts of one ring their numbers. One thread at a time, but a garbage collection may call it again in
    the middle of a call."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: dict[int, Text] = {}
        """By number, the oldest first."""
        self._given_up: list[int] = []
        self._numbers = 0
        """The highest number."""
        self.sent = 0

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, number: int, index: int) -> Text | None:
        text = self._texts.get(number)
        return text if text is not None and text.index == index else None

    def take_number(self) -> int:
        """Return a number for a text that the caller sends next and then passes to `keep`. A pinned text keeps its
        number; if all are pinned, as in a message with thousands of texts, the numbers grow by one."""
        if self._given_up:
            return self._given_up.pop()
        if len(self._texts) >= self._most:
            for number in [*self._texts]:
                if not self._texts[number].pins:
                    self._texts.pop(number).number = 0
                    return number
        self._numbers += 1
        return self._numbers

    def keep(self, text: Text, number: int) -> int:
        self.sent += 1
        self._texts[number] = text
        text.number, text.index = number, self.sent
        return number

    def give_up(self, text: Text) -> None:
        """Take back the number of a text that was not sent."""
        self._given_up.append(text.number)
        del self._texts[text.number]
        text.number = 0
