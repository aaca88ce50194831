"""What can go wrong when a file is fetched, and whether to try once more, elsewhere, or not at all."""

from __future__ import annotations


class GetError(Exception):
    """A model cannot be had. The text says what was tried, what came and what to do."""


class SourceFailed(Exception):
    """This address does not give the file; another one may."""


class Interrupted(Exception):
    """The connection broke or the server faltered; the same address may give the rest."""


class WrongContent(SourceFailed):
    """All bytes came, and they are not those of the file."""
