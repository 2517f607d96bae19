"""Reads parts of collections at a cluster time, along the index of ``_id``, over connections that may break.

The server finds a part by the bounds of the index alone (``min``, ``max``), which have the order of all types; a filter
such as ``$gt`` would see one type only. Documents come in the order of the keys, so a read whose connection broke goes
on behind the last document that was given, at the same time: it sees the same. A collection is named by its UUID, too:
another one that took its name is not read in its place.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import bson
import pyarrow as pa
from bson.binary import UUID_SUBTYPE, Binary, UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.errors import BSONError
from bson.int64 import Int64
from bson.json_util import JSONMode, JSONOptions, dumps, loads
from bson.objectid import ObjectId

from headwater.errors import TransientError
from headwater.sources.errors import InvalidRange, SnapshotExpired
from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.connection import Client, CollectionReplaced, Dsn, server_errors
from headwater.sources.mongodb.documents.columns import ID_KEY
from headwater.sources.mongodb.documents.decoder import Conflict, DocumentDecoder, RawArray, told
from headwater.sources.mongodb.documents.elements import document_end, elements
from headwater.sources.mongodb.documents.errors import UnreadableKey
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.mongodb.documents.types import ID, Kind, column_type
from headwater.sources.mongodb.raw_cursor import RawCursor
from headwater.sources.mongodb.server import as_timestamp
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceColumn, SourceTable
from headwater.system.retry import Retries

_TEXT: Final = JSONOptions(
    json_mode=JSONMode.CANONICAL,
    datetime_conversion=DatetimeConversion.DATETIME_MS,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
)
CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, uuid_representation=UuidRepresentation.UNSPECIFIED
)
_SIZE: Final = struct.Struct("<i")
_HEX: Final = re.compile(r"[0-9a-fA-F]{24}")


def text_of(value: Any) -> str:
    """The text of a value that :data:`CODEC` decoded."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool | DatetimeMS):
        return str(int(value))
    return dumps(value, json_options=_TEXT, separators=(",", ":"))


def value_of(text: str) -> Any:
    """What :func:`text_of` wrote. :raises ValueError: it is no such text."""
    try:
        return loads(text, json_options=_TEXT)
    except (BSONError, TypeError, KeyError) as error:
        raise ValueError("no extended JSON") from error


def id_of(document: bytes | memoryview) -> Any:
    """The ``_id`` of a raw document, whatever its other fields hold. :raises ValueError: it cannot be read."""
    data = bytes(document)
    for kind, name, start, stop in elements(data, 0, document_end(data, 0, len(data)), 0):
        if name == b"_id":
            body = bytes((kind,)) + b"_id\0" + data[start:stop] + b"\0"
            try:
                return bson.decode(_SIZE.pack(len(body) + 4) + body, CODEC)["_id"]
            except BSONError:
                raise ValueError("a text that is not UTF-8") from None
    raise ValueError("a document without _id")


def raw_id(text: str) -> bytes:
    """The raw document ``{_id: …}`` of a value's text."""
    return bson.encode({"_id": value_of(text)}, codec_options=CODEC)


def order_key(text: str) -> bytes:
    """Bytes that sort as MongoDB sorts the values of such texts."""
    return id_key(raw_id(text))


def read_value(table: SourceTable, text: str) -> str:
    """The text of the key that a person wrote as *text*: as the type of the key has it, or as extended JSON.

    :raises InvalidRange: it is none.
    """
    column = table.column(table.key_columns[0])
    kind = column_type(column).kind
    try:
        return text_of(_read(kind, text))
    except ValueError:
        raise InvalidRange(
            f"Key column {column.name!r} of {table.full_name} is of type {column.source_type}; a value is not.",
            next_step='Write it as extended JSON: 5, "text", {"$oid": "…"}, {"$date": "2026-01-31T00:00:00Z"}.',
        ) from None


def _read(kind: Kind, text: str) -> Any:
    if text.startswith("{"):
        return value_of(text)
    if kind is Kind.OBJECT_ID:
        if not _HEX.fullmatch(text):
            raise ValueError("no ObjectId")
        return ObjectId(text)
    if kind in (Kind.INT, Kind.LONG):
        return Int64(int(text))
    if kind is Kind.UUID:
        return Binary(uuid.UUID(text).bytes, 4)
    if kind is Kind.DATE:
        moment = datetime.fromisoformat(text)
        return DatetimeMS(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    if kind is Kind.STRING:
        return json.loads(text) if text.startswith('"') else text
    return value_of(text)


_log = logging.getLogger(__name__)

FIRST_DOCUMENTS: Final = 1000
MOST_DOCUMENTS: Final = 100_000
"""Of one answer, which has no more than 16 MB."""
_MIN_KEY: Final = '{"$minKey":1}'
_MAX_KEY: Final = '{"$maxKey":1}'


def read_concern(at: int | None) -> dict[str, Any]:
    """What a command says to see the documents as they were at a cluster time; ``None``: those of now."""
    if at is None:
        return {"level": "majority"}
    return {"level": "snapshot", "atClusterTime": as_timestamp(at)}


def finds(collection: str, part: KeyRange) -> Iterator[dict[str, Any]]:
    """The commands that find the documents of *part*, in the order of their keys; without what they share."""
    start, end = part.start, part.end
    command: dict[str, Any] = {"find": collection, "hint": {"_id": 1}}
    if start is None and end is None:
        yield command | {"sort": {"_id": 1}}
        return
    low = _MIN_KEY if start is None else start.values[0]
    high = _MAX_KEY if end is None else end.values[0]
    if order_key(low) < order_key(high):  # otherwise the server refuses the bounds
        bounded = command | {"sort": {"_id": 1}}
        if start is not None:
            bounded["min"] = {"_id": value_of(low)}
            if start.after:
                bounded["filter"] = {"_id": {"$ne": value_of(low)}}
        if end is not None:
            bounded["max"] = {"_id": value_of(high)}
        yield bounded
    # the end of the bounds is not in them; without an end it is the greatest key of all
    if (end is None or end.after) and (start is None or _lies_before(start, Cut((high,)))):
        yield {"find": collection, "filter": {"_id": {"$eq": value_of(high)}}, "limit": 1}


def _lies_before(start: Cut, end: Cut) -> bool:
    """Whether the key of *end* lies behind *start*."""
    low, high = order_key(start.values[0]), order_key(end.values[0])
    return low < high or (low == high and not start.after)


class PartReader:
    """One read of *columns* of the documents of *part*, over as many connections as it takes.

    :param at: the cluster time; ``None``: now, and after a break as they are then.
    :param remarks: where to say that values are null because their columns did not take them.
    """

    def __init__(
        self,
        dsn: Dsn,
        client: Client,
        table: SourceTable,
        part: KeyRange,
        at: int | None,
        columns: Sequence[SourceColumn],
        remarks: list[str] | None = None,
    ) -> None:
        self._dsn, self._client, self._table, self._part, self._at = dsn, client, table, part, at
        self._names = [column.name for column in columns]
        named = {*self._names, *table.key_columns}
        read = replace(table, columns=tuple(column for column in table.columns if column.name in named))
        self._decoder = DocumentDecoder(read)
        self._is_all = self._names == [column.name for column in read.columns]
        self._remarks = remarks
        self._uuid: Binary | None = None
        self._given: memoryview | None = None
        self._conflicts: list[Conflict] = []
        whole = any(column_type(column).kind in (Kind.DOCUMENT, Kind.REST) for column in read.columns)
        fields = {ID, *(column.name for column in read.columns if column.name != ID_KEY)}
        whole |= any("." in name or name.startswith("$") for name in fields)  # the server takes it for a path
        self._fields = None if whole or len(read.columns) == len(table.columns) else dict.fromkeys(fields, 1)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows.

        :raises SnapshotExpired: the server no longer has the documents of that time.
        :raises SourceUnreachable: the connection broke again and again.
        """
        retries = Retries()
        while True:
            try:
                for documents in self._answers():
                    decoded = self._decoder.decode(RawArray(documents))
                    self._conflicts += decoded.conflicts
                    yield decoded.batch if self._is_all else decoded.batch.select(self._names)
                    self._given = documents
                    retries.progressed()
                self._tell_conflicts()
                return
            except CollectionReplaced:
                raise SnapshotExpired(
                    f"Collection {self._table.full_name} was dropped, or made anew, since it was planned to be read.",
                    next_step=f"Take a new snapshot. Where the table was stopped: headwater resnapshot"
                    f" {self._table.full_name}",
                ) from None
            except SnapshotExpired:
                raise
            except TransientError as error:
                retries.wait_after(error)
                self._go_on()

    def _tell_conflicts(self) -> None:
        """Values of the part that columns did not take, which are null: told once for each kind."""
        if self._conflicts:
            text = told(self._conflicts)
            _log.warning("History of %s: %s.", self._table.full_name, text)
            if self._remarks is not None:
                self._remarks.append(f"In its history: {text}.")
            self._conflicts = []

    def _go_on(self) -> None:
        """What is left lies behind the last document that was given."""
        if self._given is not None:
            try:
                last = text_of(id_of(last_document(self._given)))
            except ValueError as error:
                raise UnreadableKey(self._table.full_name, str(error)) from None
            self._part, self._given = KeyRange(Cut((last,), after=True), self._part.end), None

    def _answers(self) -> Iterator[memoryview]:
        """The documents of each answer."""
        if self._table.source_id is not None and self._uuid is None:
            with server_errors(self._dsn):
                self._uuid = Binary(catalog.uuid_of(self._client, self._table), UUID_SUBTYPE)
        for command in list(finds(self._table.name, self._part)):
            with self._opened(command) as cursor:
                answer = cursor.opened
                while True:
                    cursor.ask()  # the server goes on while these are decoded
                    if not answer.is_empty:
                        yield answer.documents
                    if answer.is_last:
                        break
                    following = cursor.next()
                    assert following is not None
                    answer = following

    def _opened(self, command: Mapping[str, Any]) -> RawCursor:
        shared: dict[str, Any] = {"readConcern": read_concern(self._at), "batchSize": FIRST_DOCUMENTS}
        if self._fields is not None:
            shared["projection"] = self._fields
        if self._uuid is not None:
            shared["collectionUUID"] = self._uuid
        return RawCursor(
            self._dsn, self._client, self._table.namespace, {**command, **shared}, batch_size=MOST_DOCUMENTS
        )


def last_document(array: memoryview) -> memoryview:
    """The last document of a BSON array that is not empty."""
    at, end, number = 4, len(array) - 1, 0
    while True:
        start = at + 2 + len(str(number))
        at = start + _SIZE.unpack_from(array, start)[0]
        if at >= end:
            return array[start:at]
        number += 1
