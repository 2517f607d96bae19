"""ColumnClause: a column as ``ALTER TABLE`` defines it. Pure.

Only what is certain is read: a type that is written in an unusual way, a default that is computed or a text with
escapes is unknown here, and the table is read again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from headwater.sources.mysql.types import GEOMETRIES

Tokens: TypeAlias = Sequence[tuple[str, str]]
"""Kind (``name``, ``word``, ``text``, ``sign``) and text."""

_ALIASES: Final = {
    "integer": "int",
    "int1": "tinyint",
    "int2": "smallint",
    "int3": "mediumint",
    "middleint": "mediumint",
    "int4": "int",
    "int8": "bigint",
    "dec": "decimal",
    "fixed": "decimal",
    "numeric": "decimal",
    "character": "char",
    "bool": "tinyint(1)",
    "boolean": "tinyint(1)",
}
_SIZES: Final = {"char": "1", "binary": "1", "bit": "1", "decimal": "10,0"}
_TYPES: Final = frozenset(
    (
        *("tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "bit", "year", "date"),
        *("time", "datetime", "timestamp", "char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json"),
        *("enum", "set", "binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"),
        *("uuid", "inet4", "inet6", "vector", *GEOMETRIES),
    )
)
_UNSIZED: Final = frozenset(("text", "blob", "tinytext", "mediumtext", "longtext"))
_TEXTS: Final = frozenset(("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set"))
_COMPUTED: Final = frozenset(("AUTO_INCREMENT", "GENERATED", "AS", "VIRTUAL", "STORED", "PERSISTENT", "SERIAL"))
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class Literal(Enum):
    """How a default is written."""

    NULL = "null"
    TEXT = "text"
    NUMBER = "number"
    BITS = "bits"
    COMPUTED = "computed"  # no constant, or one that is not read here


_COMPUTED_DEFAULT: Final = (Literal.COMPUTED, "")
_WORDS: Final = {"NULL": (Literal.NULL, ""), "TRUE": (Literal.NUMBER, "1"), "FALSE": (Literal.NUMBER, "0")}


@dataclass(frozen=True, slots=True)
class ColumnClause:
    """A column as a statement defines it.

    :ivar type: as the catalog writes it; empty where that is not certain.
    :ivar charset: of a text; empty: that of the table; ``None``: not certain.
    :ivar default: ``None`` where none is given. :ivar is_computed: from other columns, or by counting.
    """

    name: str
    type: str
    charset: str | None = ""
    nullable: bool = True
    default: tuple[Literal, str] | None = None
    is_computed: bool = False


def parse_column(name: str, tokens: Tokens, *, certain: bool = True) -> ColumnClause:
    """:param tokens: what follows the name. :param certain: the statement is written in the usual dialect."""
    kind, place = _type(tokens)
    charset: str | None = ""
    default: tuple[Literal, str] | None = None
    nullable, says_null, computed = True, False, not certain
    while place < len(tokens):
        word, after = _word(tokens, place), _word(tokens, place + 1)
        place += 1
        if word in ("UNSIGNED", "ZEROFILL"):
            kind += f" {word.lower()}" if kind else ""
        elif word in ("CHARSET", "COLLATE") or (word == "CHARACTER" and after == "SET"):
            place += word == "CHARACTER"
            place += _text(tokens, place) == "="
            named = _text(tokens, place).lower()
            charset = charset_of(named) if word == "COLLATE" and not charset else charset or charset_name(named)
            place += 1
        elif word in ("ASCII", "UNICODE", "BYTE") or (word == "BINARY" and kind.startswith(tuple(_TEXTS))):
            charset = None
        elif word == "NOT" and after == "NULL":
            nullable, place = False, place + 1
        elif word == "NULL":
            says_null = True
        elif word == "PRIMARY":
            nullable = False
        elif word == "DEFAULT":
            default, place = _default(tokens, place)
        elif word in _COMPUTED:
            computed = True
        elif word in ("COMMENT", "AFTER", "REFERENCES"):
            place += 1
        elif _text(tokens, place - 1) == "(":
            place = _closed(tokens, place - 1)
    if says_null and nullable and default is None:
        default = Literal.NULL, ""
    if charset == "binary" or not certain:
        kind, charset = "", None
    return ColumnClause(name, kind, charset, nullable, default, computed)


def charset_name(name: str) -> str:
    return "utf8mb3" if name == "utf8" else name


def charset_of(collation: str) -> str:
    """The character set of a collation; MariaDB's short names of collations have none."""
    first = collation.partition("_")[0]
    return "" if first == "uca1400" else charset_name(first)


def _type(tokens: Tokens) -> tuple[str, int]:
    """The type as the catalog writes it, and what follows; empty where it is not certain."""
    word = _word(tokens, 0).lower()
    word = _ALIASES.get(word, word)
    place = 1
    if word in ("double", "char") and _word(tokens, 1) in ("PRECISION", "VARYING"):
        word, place = ("double" if word == "double" else "varchar"), 2
    inside = ""
    if _text(tokens, place) == "(" and tokens[place][0] == "sign":
        end = _closed(tokens, place)
        inner, place = tokens[place + 1 : end - 1], end
        inside = "".join(_quoted(text) if kind == "text" else text for kind, text in inner)
        if "\\" in inside:
            return "", place
    if word == "tinyint(1)":
        return word, place
    if word not in _TYPES or (inside and word in _UNSIZED):
        return "", place
    if word == "float" and inside and "," not in inside:
        word, inside = ("float" if int(inside) <= 24 else "double"), ""
    if word in ("datetime", "timestamp", "time") and inside == "0":
        inside = ""
    inside = inside or _SIZES.get(word, "")
    if word == "decimal" and "," not in inside:
        inside = f"{inside},0"
    return f"{word}({inside})" if inside else word, place


def _default(tokens: Tokens, place: int) -> tuple[tuple[Literal, str], int]:
    """A default, and what follows it."""
    kind, text = tokens[place] if place < len(tokens) else ("sign", "")
    word = text.upper()
    if kind == "text":
        return (_COMPUTED_DEFAULT if "\\" in text else (Literal.TEXT, text)), place + 1
    if word in _WORDS:
        return _WORDS[word], place + 1
    if word == "B" and place + 1 < len(tokens) and tokens[place + 1][0] == "text":
        return (Literal.BITS, tokens[place + 1][1]), place + 2
    joined, end = text, place + 1
    while end < len(tokens) and tokens[end][0] != "text" and re.fullmatch(r"[+.-]|\d\w*", tokens[end][1]):
        joined, end = joined + tokens[end][1], end + 1
    if _NUMBER.fullmatch(joined):
        return (Literal.NUMBER, joined), end
    return _COMPUTED_DEFAULT, place + (kind == "word")


def _closed(tokens: Tokens, place: int) -> int:
    """What follows the parenthesis that opens at *place*."""
    depth = 0
    for end in range(place, len(tokens)):
        if tokens[end][0] == "sign":
            depth += (tokens[end][1] == "(") - (tokens[end][1] == ")")
            if not depth:
                return end + 1
    return len(tokens)


def _word(tokens: Tokens, place: int) -> str:
    return tokens[place][1].upper() if place < len(tokens) and tokens[place][0] == "word" else ""


def _text(tokens: Tokens, place: int) -> str:
    return tokens[place][1] if place < len(tokens) else ""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
