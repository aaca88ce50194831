"""Names and messages that models give: str, or bytes as they come out of tensors, which Triton takes as well."""

from __future__ import annotations


def as_text(value: str | bytes, what: str) -> str:
    """
    Raises:
        TypeError: it is neither; `what` says what it was to be.
        UnicodeDecodeError: the bytes are no UTF-8.
    """
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {type(value).__name__}")
    return value
