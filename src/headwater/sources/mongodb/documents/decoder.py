"""DocumentDecoder: raw BSON documents of one collection into a RecordBatch of its columns. Pure.

>>> decoder = DocumentDecoder(table)  # doctest: +SKIP
>>> for batch in collection.find_raw_batches():  # doctest: +SKIP
...     decoded = decoder.decode(batch)  # decoded.batch, decoded.conflicts

What is decoded is one of: the bytes of documents that stand one after another (a batch of ``find_raw_batches``), a
sequence of such bytes, a :class:`RawArray` (a batch as it stands in the answer of a server), or a binary Arrow array
with one document in each element, where a null gives a row of nulls (a column of :class:`~.events.EventDecoder`). Rows
come in the order of the documents.

The columns, their types and what happens to values that they do not take are those of the
:class:`~headwater.sources.table.SourceTable` (:mod:`.types`, :mod:`.columns`). With the special-value policy ``null``
such a value is null and counted in :attr:`Decoded.conflicts`; a key column has no such policy. A row of a document has
a key always; otherwise :class:`~.errors.KeyOfOtherType`.

A batch is decoded whole or not at all. Nothing of a document is ever part of an error. A decoder is used by one thread
at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from headwater.sources.errors import SourceProtocolError, SpecialValue
from headwater.sources.mongodb.documents.errors import KeyOfOtherType, UnreadableText
from headwater.sources.mongodb.documents.layout import (
    IN_A_ROW,
    IN_AN_ARRAY,
    NO_TEXT,
    Codec,
    Made,
    codec,
    described,
    found_names,
)
from headwater.sources.mongodb.documents.types import ID, DocumentType, Kind, column_type
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues


@dataclass(frozen=True, slots=True)
class RawArray:
    """The bytes of a BSON array whose elements are documents."""

    data: bytes | bytearray | memoryview


RawDocuments: TypeAlias = (
    "bytes | bytearray | memoryview | Sequence[bytes] | RawArray | pa.BinaryArray | pa.LargeBinaryArray"
)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Values of one batch that a column did not take; they are null.

    :ivar path: the column, and the fields inside of it: ``address.city``; ``tags[]`` are the elements of an array.
    :ivar wanted: the type of the column or field. :ivar found: what was found, as MongoDB names types.
    :ivar count: how many values.
    """

    column: str
    path: str
    wanted: str
    found: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch."""

    batch: pa.RecordBatch
    conflicts: tuple[Conflict, ...]


class DocumentDecoder:
    """Documents of the collection that *table* describes."""

    def __init__(self, table: SourceTable, *, codec_used: Codec | None = None) -> None:
        self._table, self._codec = table, codec_used or codec()
        self._types = [DocumentType(Kind.JSON) if one.dropped else column_type(one) for one in table.columns]
        self._plan = self._codec.plan(
            tuple(
                described(_field(column, kind), kind, required=column.name in table.key_columns)
                for column, kind in zip(table.columns, self._types, strict=True)
            )
        )

    def decode(self, raw: RawDocuments) -> Decoded:
        """:raises SourceProtocolError: these are no documents.
        :raises SpecialValue: a column does not take a value, and its policy is ``stop``.
        :raises KeyOfOtherType: a document has no key that its column takes.
        """
        try:
            rows, made = decoded(self._codec, self._plan, raw)
        except ValueError as error:
            raise SourceProtocolError(
                f"Documents of collection {self._table.full_name} cannot be read: {error}.",
                next_step="Read them again; if it happens again, run db.runCommand({validate: …, full: true}) there.",
            ) from None
        conflicts: list[Conflict] = []
        arrays = []
        for column, kind, one in zip(self._table.columns, self._types, made, strict=True):
            if column.dropped:
                arrays.append(pa.nulls(rows, column.type))
                continue
            found = tuple(_conflicts(column.name, column.name, kind, one))
            if found:
                self._judge(column, found)
                conflicts.extend(found)
            arrays.append(array(kind, one))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._table.schema)
        return Decoded(batch, tuple(conflicts))

    def _judge(self, column: SourceColumn, conflicts: Sequence[Conflict]) -> None:
        found = "; ".join(
            f"{', '.join(one.found)}{'' if one.path == one.column else f' at {one.path} ({one.wanted})'}"
            for one in conflicts
        )
        name, kind = column.name, column.source_type
        if name in self._table.key_columns:
            raise KeyOfOtherType(self._table.full_name, name, kind, found)
        is_inside = any(one.path != one.column for one in conflicts)
        if column.special_values.makes_null and not (is_inside and column.special_values is SpecialValues.PARK):
            return
        for one in conflicts:
            if one.found == NO_TEXT:
                raise UnreadableText(self._table.full_name, name, one.path)
        raise SpecialValue(self._table.full_name, name, kind, found)


def told(conflicts: Iterable[Conflict]) -> str:
    """What people are told of *conflicts*: how many of each kind, and nothing of the values."""
    counts: dict[tuple[str, str, str], int] = {}
    for one in conflicts:
        kind = one.path, one.wanted, ", ".join(one.found)
        counts[kind] = counts.get(kind, 0) + one.count
    return "; ".join(
        f"{count} values of {path} are null: {found}, and not {wanted}"
        for (path, wanted, found), count in counts.items()
    )


def decoded(codec_used: Codec, plan: Any, raw: RawDocuments) -> tuple[int, list[Made]]:
    """What *codec_used* makes of *raw*, whatever that is. :raises ValueError: these are no documents."""
    if isinstance(raw, (pa.Array, pa.ChunkedArray)):
        whole = raw.combine_chunks() if isinstance(raw, pa.ChunkedArray) else raw
        whole = whole.cast(pa.binary()) if whole.type != pa.binary() else whole
        validity, offsets, data = whole.buffers()
        return codec_used.decode(
            plan, data or b"", offsets or bytes(4), validity if whole.null_count else None, whole.offset, len(whole)
        )
    if isinstance(raw, RawArray):
        return codec_used.decode(plan, raw.data, None, None, IN_AN_ARRAY, 0)
    joined = raw if isinstance(raw, (bytes, bytearray, memoryview)) else b"".join(raw)
    return codec_used.decode(plan, joined, None, None, IN_A_ROW, 0)


def array(kind: DocumentType, made: Made) -> pa.Array:
    """The Arrow array of what was made."""
    length, nulls, _, _, validity, values, data, children = made
    inner = [array(of, one) for (_, of), one in zip(kind.fields, children, strict=True)]
    buffers = [
        None if buffer is None else buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
        for buffer in (validity if nulls else None, values, data)
    ]
    if kind.kind is Kind.STRUCT:
        return pa.Array.from_buffers(kind.arrow, length, buffers[:1], nulls, children=inner)
    if kind.kind is Kind.LIST:
        return pa.Array.from_buffers(kind.arrow, length, buffers[:2], nulls, children=inner)
    return pa.Array.from_buffers(kind.arrow, length, buffers if data is not None else buffers[:2], nulls)


def _field(column: SourceColumn, kind: DocumentType) -> str:
    return ID if kind.kind is Kind.KEY else column.name


def _conflicts(column: str, path: str, kind: DocumentType, made: Made) -> Iterator[Conflict]:
    if made[2]:
        yield Conflict(column, path, kind.text, found_names(made[3]), made[2])
    for (name, inner), child in zip(kind.fields, made[7], strict=True):
        yield from _conflicts(column, f"{path}.{name}" if name else f"{path}[]", inner, child)
