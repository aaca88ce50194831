"""Reads the bodies of embeddings and of reranking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rocserve.core.errors import ServeError
from rocserve.core.printable import names_hint
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.json_text import checked_text, kind_of, parse_json
from rocserve.frontends.http.openai.errors import FieldFault

Ids = np.ndarray[Any, np.dtype[np.int64]]
_Body = TypeVar("_Body")

MOST_TEXTS = 2048
"""Texts in one body, as in OpenAI's API. It bounds the answer, which a small body could make large."""


@dataclass(frozen=True, slots=True)
class EmbeddingsBody:
    """The body of a request for embeddings."""

    model: str
    texts: Sequence[str]
    ids: Sequence[Ids]
    """Token ids in place of texts, of each text an array. Either this or `texts` is empty."""
    is_base64: bool
    dimensions: int | None
    """The length of vectors that the client asks for."""


@dataclass(frozen=True, slots=True)
class RerankBody:
    """The body of a request for a ranking."""

    model: str
    query: str
    documents: Sequence[str]
    top_n: int | None
    """None = all."""
    returns_documents: bool
    most_tokens: int | None = None
    """Tokens of a document beyond which the client wants it cut; None = as the model does."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a FieldFault says, as a value that another process can return."""

    member: str
    text: str


def attempted(read: Callable[[Mapping[str, Any]], _Body], body: Buffer) -> _Body | Fault:
    """Parse a body and read it. Called in the process for large bodies, too."""
    try:
        value = parse_json(body)
        if type(value) is not dict:
            raise FieldFault("", f"the body: expected a JSON object, got {_kind(value)}")
        return read(value)
    except FieldFault as error:
        return Fault(error.member, error.text)
    except ServeError as error:
        return Fault("", error.text)


def read_embeddings(body: Mapping[str, Any]) -> EmbeddingsBody:
    """Raises FieldFault."""
    given = _members(body, ("model", "input", "encoding_format", "dimensions", "user"))
    texts, ids = _texts_or_ids(given.get("input"))
    if "user" in given:
        _text(given, "user")
    encoding = given.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise FieldFault("encoding_format", f"encoding_format: expected 'float' or 'base64', got {_shown(encoding)}")
    return EmbeddingsBody(_text(given, "model"), texts, ids, encoding == "base64", _count(given, "dimensions"))


def read_rerank(body: Mapping[str, Any]) -> RerankBody:
    """Raises FieldFault."""
    given = _members(body, ("model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc"))
    returns = given.get("return_documents", False)
    if type(returns) is not bool:
        raise FieldFault("return_documents", f"return_documents: expected true or false, got {_shown(returns)}")
    documents = _documents(given.get("documents"))
    top_n, most_tokens = _count(given, "top_n"), _count(given, "max_tokens_per_doc")
    return RerankBody(_text(given, "model"), _text(given, "query"), documents, top_n, returns, most_tokens)


def _members(body: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """Return the members that are not null; null means missing."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in known:
            shown = name.encode(errors="replace").decode()
            raise FieldFault(shown, f"unknown member '{shown}'{names_hint('the members are', shown, known)}")
    return given


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if type(value) is not str or not value:
        raise FieldFault(name, f"{name}: expected a text, got {_shown(value)}")
    return _encodable(name, value)


def _count(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise FieldFault(name, f"{name}: expected a whole number from 1 on, got {_shown(value)}")
    return value


def _texts_or_ids(value: Any) -> tuple[Sequence[str], Sequence[Ids]]:
    expected = "input: expected a text, a list of texts, a list of token ids, or a list of such lists"
    if type(value) is str:
        return [_item("input", "input", value)], ()
    if type(value) is not list or not value:
        raise FieldFault("input", f"{expected}, got {_shown(value)}")
    if type(value[0]) is int:
        return (), [_ids(value, "input")]
    _check_number("input", value)
    if type(value[0]) is list:
        return (), [_ids(ids, f"input[{place}]") for place, ids in enumerate(value)]
    if type(value[0]) is not str:
        raise FieldFault("input", f"{expected}, got a list whose first element is {_kind(value[0])}")
    return [_item("input", f"input[{place}]", text) for place, text in enumerate(value)], ()


def _item(member: str, where: str, value: Any) -> str:
    """Return one of many texts. An empty one is refused, as by OpenAI, because its vector would mean nothing."""
    if type(value) is not str or not value:
        raise FieldFault(member, f"{where}: expected a text of at least one character, got {_shown(value)}")
    return _encodable(member, value)


def _ids(value: Any, where: str) -> Ids:
    """Return an array: another process hands it over much faster than a list of millions of numbers."""
    if type(value) is not list or not value:
        raise FieldFault("input", f"{where}: expected a list of token ids, got {_shown(value)}")
    for place, number in enumerate(value):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise FieldFault("input", f"{where}[{place}]: expected a token id, a whole number, got {_shown(number)}")
    return np.array(value, np.int64)


def _documents(value: Any) -> Sequence[str]:
    if type(value) is not list or not value:
        raise FieldFault("documents", f"documents: expected a list of texts, got {_shown(value)}")
    _check_number("documents", value)
    texts = []
    for place, document in enumerate(value):
        if type(document) is dict:
            if set(document) != {"text"}:
                names = ", ".join(sorted(document)).encode(errors="replace").decode()
                raise FieldFault(
                    "documents",
                    f'documents[{place}]: expected a text or {{"text": ...}}, got an object with'
                    f" {names or 'no members'}; send only the text",
                )
            document = document["text"]
        texts.append(_item("documents", f"documents[{place}]", document))
    return texts


def _check_number(member: str, values: Sequence[Any]) -> None:
    if len(values) > MOST_TEXTS:
        raise FieldFault(
            member,
            f"{member}: expected at most {MOST_TEXTS} elements, got {len(values)}; send several requests",
        )


def _encodable(member: str, value: str) -> str:
    try:
        return checked_text(value)
    except ServeError as error:
        raise FieldFault(member, f"{member}: {error.text}") from None


def _kind(value: Any) -> str:
    return "nothing" if value is None else kind_of(value)


def _shown(value: Any) -> str:
    """Return a value as an error text shows it: short, and never the client's text itself."""
    if type(value) in (int, float, bool):
        return repr(value)[:40]
    if type(value) in (str, list) and not value:
        return f"an empty {_kind(value)[2:]}"
    return _kind(value)
