"""The types that a column of a collection has: the names that MongoDB gives them, and what each takes in Arrow.

=======================  ===========================================================================================
type                     Arrow, and which values it takes
=======================  ===========================================================================================
int, long                int32, int64: any int, long or double that is such a whole number
double                   double: any double, and any int or long that a double holds exactly
bool                     bool
string                   string
objectId                 string: 24 hexadecimal digits, whose order is that of the ids
date                     timestamp[ms, UTC], of the years 1 to 9999
timestamp                uint64: seconds in the high 32 bits, the ordinal in the low
decimal                  string: all digits and the exponent, as MongoDB prints it; also NaN, Infinity and -0
decimal(p,s)             decimal128 up to 38 digits, else decimal256: decimals, ints and longs with no more than s
                         digits after the point; not NaN, the infinities and -0
binData, binData(n)      binary: bytes of subtype 0, or of subtype n
uuid                     string of 36 characters: bytes of subtype 4
array<T>                 list of T
struct<a: T, b: U>       struct; fields that it does not name are left out, those that a document lacks are null
json                     string: any value as relaxed extended JSON; null is null
document                 string: the whole document as relaxed extended JSON
rest                     string: what no other column takes, as an object of extended JSON; null where there is nothing
key                      binary: ``_id`` as bytes that sort as MongoDB sorts it (:mod:`.key_order`)
=======================  ===========================================================================================

A value that its column does not take is a special value of it: an error, null and counted, or, with ``text``, the
column is ``json`` from the start. A field that a document does not have is null. Of a field that it has twice the first
counts, as for the server.

A name that is not made of letters, digits and underscores stands in backticks: ```struct<`first name`: string>```.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import pyarrow as pa

from headwater.sources.mongodb.documents.errors import InvalidType
from headwater.sources.table import SourceColumn, SpecialValues


class Kind(IntEnum):
    """What a column becomes; the numbers are those of the compiled code."""

    INT = 0
    LONG = 1
    DOUBLE = 2
    BOOL = 3
    STRING = 4
    OBJECT_ID = 5
    DATE = 6
    TIMESTAMP = 7
    DECIMAL_TEXT = 8
    DECIMAL = 9
    BINARY = 10
    UUID = 11
    JSON = 12
    KEY = 13
    RAW = 14
    STRUCT = 15
    LIST = 16
    DOCUMENT = 17
    REST = 18


MOST_DIGITS: Final = 76
ID: Final = "_id"

_NAMES: Final = {
    "int": Kind.INT,
    "long": Kind.LONG,
    "double": Kind.DOUBLE,
    "bool": Kind.BOOL,
    "string": Kind.STRING,
    "objectId": Kind.OBJECT_ID,
    "date": Kind.DATE,
    "timestamp": Kind.TIMESTAMP,
    "decimal": Kind.DECIMAL_TEXT,
    "binData": Kind.BINARY,
    "uuid": Kind.UUID,
    "json": Kind.JSON,
    "key": Kind.KEY,
    "raw": Kind.RAW,
    "document": Kind.DOCUMENT,
    "rest": Kind.REST,
}
_OUTERMOST: Final = (Kind.KEY, Kind.DOCUMENT, Kind.REST)
_ARROW: Final = {
    Kind.INT: pa.int32(),
    Kind.LONG: pa.int64(),
    Kind.DOUBLE: pa.float64(),
    Kind.BOOL: pa.bool_(),
    Kind.DATE: pa.timestamp("ms", tz="UTC"),
    Kind.TIMESTAMP: pa.uint64(),
    Kind.BINARY: pa.binary(),
    Kind.KEY: pa.binary(),
    Kind.RAW: pa.binary(),
}
_TOKEN: Final = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|`([^`\0]+)`|(\d+)|([<>(),:]))")
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEEPEST: Final = 32


@dataclass(frozen=True, slots=True)
class DocumentType:
    """A type, taken apart.

    :ivar digits: of a decimal. :ivar scale: of a decimal; of bytes their subtype.
    :ivar fields: of a struct: names and types; of an array: one, without a name.
    """

    kind: Kind
    digits: int = 0
    scale: int = 0
    fields: tuple[tuple[str, DocumentType], ...] = ()

    @classmethod
    def parse(cls, text: str) -> DocumentType:
        """:raises ValueError: it is no type; why."""
        parser = _Parser(text)
        found = parser.type(0)
        parser.end()
        return found

    @property
    def text(self) -> str:
        """What :meth:`parse` reads."""
        if self.kind is Kind.STRUCT:
            inner = ", ".join(f"{_quoted(name)}: {kind.text}" for name, kind in self.fields)
            return f"struct<{inner}>"
        if self.kind is Kind.LIST:
            return f"array<{self.fields[0][1].text}>"
        if self.kind is Kind.DECIMAL:
            return f"decimal({self.digits},{self.scale})"
        name = next(name for name, kind in _NAMES.items() if kind is self.kind)
        return f"{name}({self.scale})" if self.kind is Kind.BINARY and self.scale else name

    @property
    def arrow(self) -> pa.DataType:
        if self.kind is Kind.STRUCT:
            return pa.struct([pa.field(name, kind.arrow) for name, kind in self.fields])
        if self.kind is Kind.LIST:
            return pa.list_(self.fields[0][1].arrow)
        if self.kind is Kind.DECIMAL:
            made = pa.decimal128 if self.digits <= 38 else pa.decimal256
            return made(self.digits, self.scale)
        return _ARROW.get(self.kind, pa.string())


JSON: Final = DocumentType(Kind.JSON)


def column_type(column: SourceColumn) -> DocumentType:
    """How the values of *column* are read. :raises InvalidType: its type is none of a collection."""
    if column.special_values is SpecialValues.TEXT:
        return JSON
    return parsed(column.name, column.source_type)


def parsed(column: str, text: str) -> DocumentType:
    """:raises InvalidType: *text* is no type."""
    try:
        return DocumentType.parse(text)
    except ValueError as error:
        raise InvalidType(
            column,
            text,
            str(error),
            next_step=f"Write one of {', '.join(name for name in _NAMES if name != 'raw')}, decimal(p,s), array<…> or"
            " struct<name: …>.",
        ) from None


def source_column(
    name: str, text: str, field_id: int, *, special_values: SpecialValues = SpecialValues.STOP
) -> SourceColumn:
    """The description of a column that is declared as *text*. :raises InvalidType: it is no type."""
    kind = parsed(name, text)
    if special_values is SpecialValues.TEXT and kind.kind in (*_OUTERMOST, Kind.JSON):
        special_values = SpecialValues.STOP
    arrow = JSON.arrow if special_values is SpecialValues.TEXT else kind.arrow
    return SourceColumn(name, arrow, kind.text, field_id, special_values=special_values)


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"`{name}`"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def type(self, depth: int) -> DocumentType:
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
        name = self._take()
        if name == "array":
            self._want("<")
            inner = self.type(depth + 1)
            self._want(">")
            return DocumentType(Kind.LIST, fields=(("", inner),))
        if name == "struct":
            return self._struct(depth)
        kind = _NAMES.get(name)
        if kind is None or (depth and kind in _OUTERMOST):
            raise ValueError(f"{name!r} is no type" + (" inside another" if kind else ""))
        numbers = self._numbers()
        if not numbers:
            return DocumentType(kind)
        if kind is Kind.DECIMAL_TEXT and len(numbers) == 2:
            if not 0 < numbers[0] <= MOST_DIGITS or numbers[1] > numbers[0]:
                raise ValueError(f"a decimal has 1 to {MOST_DIGITS} digits, and no more of them after the point")
            return DocumentType(Kind.DECIMAL, numbers[0], numbers[1])
        if kind is Kind.BINARY and len(numbers) == 1 and numbers[0] < 256:
            return DocumentType(kind, scale=numbers[0])
        raise ValueError(f"{name!r} does not have these numbers")

    def _struct(self, depth: int) -> DocumentType:
        self._want("<")
        fields: dict[str, DocumentType] = {}
        while True:
            name = self._take(quoted=True)
            self._want(":")
            if name in fields:
                raise ValueError(f"a struct has two fields {name!r}")
            fields[name] = self.type(depth + 1)
            if self._peek() != ",":
                break
            self._want(",")
        self._want(">")
        return DocumentType(Kind.STRUCT, fields=tuple(fields.items()))

    def _numbers(self) -> tuple[int, ...]:
        if self._peek() != "(":
            return ()
        self._want("(")
        numbers = [int(self._take())]
        while self._peek() == ",":
            self._want(",")
            numbers.append(int(self._take()))
        self._want(")")
        return tuple(numbers)

    def _peek(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        return found[found.lastindex or 0] if found else ""

    def _take(self, *, quoted: bool = False) -> str:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastindex == 4 or (found.lastindex == 2 and not quoted):
            raise ValueError(f"a name is missing at character {self._at}")
        self._at = found.end()
        return found[found.lastindex or 0]

    def _want(self, sign: str) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found[4] != sign:
            raise ValueError(f"{sign!r} is missing at character {self._at}")
        self._at = found.end()

    def end(self) -> None:
        if self._text[self._at :].strip():
            raise ValueError(f"nothing can stand at character {self._at}")
