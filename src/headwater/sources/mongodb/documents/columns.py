"""The columns of a collection: declared, found in a sample, or one for the whole document. Pure.

A collection has no schema, so its columns are settled once, by one of three ways, and kept with its log:

* **declared**: names and types (:mod:`.types`). Fields that are not declared are left out, unless a column is declared
  as ``rest``.
* **inferred**: a column for each field at the top of the documents of a sample, and ``_rest`` for what no column takes:
  fields that come later, and those whose name no column can have.
* **document**: ``_id`` and ``document``, the whole of it as extended JSON.

What the values of a field in a sample make of its column, whatever their order; nulls say nothing:

=========================================================  ================================================
types that were found                                      column
=========================================================  ================================================
int, long                                                  long: the next int may need it
double; double and int                                     double
double and long, perhaps int                               double if it holds each of those longs, else json
decimal; with int or long                                  decimal: its text
string; objectId; bool; timestamp                          the same
date                                                       date; json if one is out of its years
binData of one subtype                                     uuid for 4 with 16 bytes each, else binData(n)
objects, arrays, all other types, any other mixture        json
=========================================================  ================================================

A field is known by its name, and by nothing else: its column has the same field id in every sample and at every place.

The key is ``_id``. Where all are whole numbers, or all strings, ObjectIds, dates or UUIDs, it is a column of that type
(``long`` for whole numbers), whose order is that of MongoDB. Where they are mixed, or of another type, or the sample is
empty, the key is ``_id_key``, bytes in the order of MongoDB (:mod:`.key_order`), and ``_id`` stands beside it as
``json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents import elements as bson
from headwater.sources.mongodb.documents.errors import InvalidType
from headwater.sources.mongodb.documents.layout import FIRST_MS, LAST_MS, found_bit
from headwater.sources.mongodb.documents.types import ID, DocumentType, Kind, parsed, source_column
from headwater.sources.table import RESERVED_COLUMNS, SourceColumn, SpecialValues

ID_KEY: Final = "_id_key"
REST: Final = "_rest"
DOCUMENT: Final = "document"
MOST_COLUMNS: Final = 500
"""Of an inferred collection; fields beyond them, those that the fewest documents have, go to the rest."""

_FORBIDDEN: Final = frozenset(" ,;{}()\n\t=.`")
"""Characters that tables do not allow in names of columns, and what would be taken for a path."""
_MOST_ID: Final = 0x7FFFFFFF
_PLAIN_IDS: Final = (Kind.LONG, Kind.STRING, Kind.OBJECT_ID, Kind.DATE, Kind.UUID)
_NO_POLICIES: Final[Mapping[str, SpecialValues]] = {}
ALL_COLUMNS: Final = "\0"
"""Among policies by column: that of the columns that have none, but for the key. No field has this name."""


@dataclass(frozen=True, slots=True)
class CollectionColumns:
    """What a :class:`~headwater.sources.table.SourceTable` is made of."""

    columns: tuple[SourceColumn, ...]
    key_columns: tuple[str, ...]


def declared_columns(
    types: Mapping[str, str],
    sample: Iterable[bytes] = (),
    special_values: Mapping[str, SpecialValues] = _NO_POLICIES,
) -> CollectionColumns:
    """Columns of *types*, in their order after the key; an ``_id`` that is not declared has the type of *sample*.

    :raises InvalidType: a type that is none, or a key that cannot be one.
    :raises SourceProtocolError: the sample holds what is no document.
    """
    others = {name: text for name, text in types.items() if name != ID}
    declared = types.get(ID)
    id_type = parsed(ID, declared) if declared is not None else _id_type(_facts(sample).get(ID))
    return _columns(id_type, others, special_values)


def inferred_columns(
    sample: Iterable[bytes], special_values: Mapping[str, SpecialValues] = _NO_POLICIES
) -> CollectionColumns:
    """Columns of the fields that the documents of *sample* have, in the order in which they first come.

    :raises SourceProtocolError: the sample holds what is no document.
    """
    facts = _facts(sample)
    id_type = _id_type(facts.pop(ID, None))
    names = [name for name in _possible(facts) if name not in (ID_KEY, REST)]
    kept = set(sorted(names, key=lambda name: (-facts[name].documents, name))[:MOST_COLUMNS])
    types = {name: facts[name].type.text for name in names if name in kept}
    return _columns(id_type, {**types, REST: "rest"}, special_values)


def document_columns(sample: Iterable[bytes] = ()) -> CollectionColumns:
    """The key and the whole document. :raises SourceProtocolError: the sample holds what is no document."""
    return _columns(_id_type(_facts(sample).get(ID)), {DOCUMENT: "document"}, _NO_POLICIES)


def _columns(
    id_type: DocumentType, types: Mapping[str, str], special_values: Mapping[str, SpecialValues]
) -> CollectionColumns:
    if id_type.kind in (Kind.STRUCT, Kind.LIST, Kind.RAW, Kind.DOCUMENT, Kind.REST):
        raise InvalidType(
            ID,
            id_type.text,
            "it cannot be a key",
            next_step='Declare _id = "key": bytes in the order of MongoDB, with _id as JSON beside them.',
        )

    def policy_of(name: str) -> SpecialValues:
        of_all = SpecialValues.STOP if name in (ID, ID_KEY) else special_values.get(ALL_COLUMNS, SpecialValues.STOP)
        return special_values.get(name, of_all)

    if id_type.kind is Kind.KEY:
        all_types = {ID_KEY: id_type.text, ID: "json", **types}
        key = ID_KEY
    else:
        all_types = {ID: id_type.text, **types}
        key = ID
    ids = _field_ids(all_types)
    columns = tuple(
        source_column(name, text, ids[name], special_values=policy_of(name)) for name, text in all_types.items()
    )
    if policy_of(ID).makes_null:
        raise InvalidType(
            ID, id_type.text, "the special values of a key cannot be null", next_step="Take =null for _id out of them."
        )
    return CollectionColumns(columns, (key,))


def _field_ids(names: Iterable[str]) -> dict[str, int]:
    """The id of each of *names*, which depends on nothing but the name; where two would have one, the next is free."""
    made: dict[str, int] = {}
    taken: set[int] = set()
    for name in sorted(names):
        one = crc32(name.encode()) & _MOST_ID
        while one in taken:
            one = one + 1 & _MOST_ID
        taken.add(one)
        made[name] = one
    return made


@dataclass(slots=True)
class _Facts:
    """What a sample tells of one field."""

    documents: int = 0
    found: int = 0
    subtypes: set[int] = field(default_factory=set)
    inexact: bool = False  # a long that a double does not hold
    far: bool = False  # a date outside of the years 1 to 9999
    odd_uuid: bool = False

    def add(self, data: bytes, kind: int, start: int, stop: int) -> None:
        self.documents += 1
        self.found |= found_bit(kind)
        if kind == bson.LONG:
            number = int.from_bytes(data[start:stop], "little", signed=True)
            self.inexact |= int(float(number)) != number
        elif kind == bson.DATE:
            self.far |= not FIRST_MS <= int.from_bytes(data[start:stop], "little", signed=True) <= LAST_MS
        elif kind == bson.BINARY:
            self.subtypes.add(data[start + 4])
            self.odd_uuid |= stop - start != 21

    @property
    def type(self) -> DocumentType:
        """See the table of the module."""
        kinds = {kind for kind in range(1, 22) if self.found >> kind & 1} - {bson.NULL}
        if not kinds:
            return DocumentType(Kind.JSON)
        if kinds <= {bson.INT, bson.LONG}:
            return DocumentType(Kind.LONG)
        if bson.DOUBLE in kinds and kinds <= {bson.DOUBLE, bson.INT, bson.LONG}:
            return DocumentType(Kind.JSON if self.inexact else Kind.DOUBLE)
        if bson.DECIMAL in kinds and kinds <= {bson.DECIMAL, bson.INT, bson.LONG}:
            return DocumentType(Kind.DECIMAL_TEXT)
        return self._single(kinds.pop()) if len(kinds) == 1 else DocumentType(Kind.JSON)

    def _single(self, kind: int) -> DocumentType:
        if kind == bson.BINARY and len(self.subtypes) == 1:
            subtype = next(iter(self.subtypes))
            if subtype == 4 and not self.odd_uuid:
                return DocumentType(Kind.UUID)
            return DocumentType(Kind.BINARY, scale=subtype)
        if kind == bson.DATE and self.far:
            return DocumentType(Kind.JSON)
        return DocumentType(_SINGLES.get(kind, Kind.JSON))


_SINGLES: Final = {
    bson.STRING: Kind.STRING,
    bson.OBJECT_ID: Kind.OBJECT_ID,
    bson.BOOL: Kind.BOOL,
    bson.DATE: Kind.DATE,
    bson.TIMESTAMP: Kind.TIMESTAMP,
}


def _facts(sample: Iterable[bytes]) -> dict[str, _Facts]:
    """By name of the field, in the order in which they first come; what is no text has no column."""
    found: dict[str, _Facts] = {}
    for document in sample:
        try:
            _add_document(found, document)
        except ValueError as error:
            raise SourceProtocolError(
                f"A document of the sample cannot be read: {error}.",
                next_step="Check the collection with db.runCommand({validate: …, full: true}).",
            ) from None
    return found


def _add_document(facts: dict[str, _Facts], document: bytes) -> None:
    end = bson.document_end(document, 0, len(document))
    if end != len(document):
        raise ValueError("a document does not end where it says")
    seen: set[bytes] = set()
    for kind, name, start, stop in bson.elements(document, 0, end, 0):
        if name in seen:
            continue
        seen.add(name)
        try:
            text = name.decode()
        except UnicodeDecodeError:
            continue
        facts.setdefault(text, _Facts()).add(document, kind, start, stop)


def _id_type(facts: _Facts | None) -> DocumentType:
    found = DocumentType(Kind.KEY) if facts is None or facts.found >> bson.NULL & 1 else facts.type
    return found if found.kind in _PLAIN_IDS else DocumentType(Kind.KEY)


def _possible(names: Iterable[str]) -> Sequence[str]:
    """Those that a column can have; of names that differ in case only the one in lower case."""
    taken = {ID, ID_KEY, REST}
    kept = set()
    for name in sorted(names, key=str.swapcase):
        if name and name not in RESERVED_COLUMNS and not _FORBIDDEN.intersection(name) and name.lower() not in taken:
            taken.add(name.lower())
            kept.add(name)
    return [name for name in names if name in kept]
