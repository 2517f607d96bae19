"""Lookup: the documents of updates that came without one, as they are now, many with one question.

A change stream tells of an update what changed. Where the server keeps no image of the document, its newest state is
asked for: at the time of the event or later, never earlier. Each key is asked for once, however often it changed. A
collection is named by its UUID, too: another one that took its name has none of its documents.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from bson.binary import UUID_SUBTYPE, Binary
from bson.raw_bson import RawBSONDocument

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.connection import Client, CollectionReplaced, Dsn, server_errors
from headwater.sources.mongodb.documents import elements
from headwater.sources.mongodb.documents.columns import ID_KEY
from headwater.sources.mongodb.documents.decoder import DocumentDecoder
from headwater.sources.mongodb.documents.types import source_column
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.raw_cursor import RawCursor
from headwater.sources.mongodb.server import as_timestamp
from headwater.sources.table import SourceTable

FIRST_SHARE: Final = 64
LEAST_SHARE: Final = 4
MOST_SHARE: Final = 65_536
MOST_BYTES: Final = 64 << 20
"""Of documents that are looked up at once, about."""
MOST_RECEIVED: Final = 4 * MOST_BYTES
"""Where they turn out to be larger: no more than these are held, unless it is one document."""
MOST_KEYS: Final = 20_000
MOST_KEY_BYTES: Final = 4 << 20
_SIZE: Final = struct.Struct("<i")
_KEY: Final = SourceTable("", "keys", (source_column(ID_KEY, "key", 1),), (ID_KEY,))


class Lookup:
    """Asks for documents by their keys.

    :ivar share: how many may be asked for at once, so that they fit into memory: as large as the last ones were.
    """

    def __init__(self, dsn: Dsn, client: Client) -> None:
        self._dsn, self._client = dsn, client
        self._keys = DocumentDecoder(_KEY)
        self._uuids: dict[int | None, bytes] = {}
        self.share = FIRST_SHARE

    def documents(self, table: SourceTable, keys: pa.BinaryArray, time: int) -> pa.BinaryArray:
        """The raw documents of the first of *keys*, of as many as fit into memory and of one at least.

        :param keys: raw documents that hold ``_id``. One that is not there any more is null.
        :param time: no state before this cluster time is given.
        :raises SourceUnreachable: no answer.
        """
        try:
            name, uuid = CollectionName(table.namespace, table.name), self._uuid(table)
            while (found := self._fitting(name, uuid, keys, time)) is None:
                keys = keys.slice(0, max(1, len(keys) // 4))
            return found
        except CollectionReplaced:
            return pa.nulls(len(keys), pa.binary())

    def _uuid(self, table: SourceTable) -> bytes:
        """Of its collection. :raises CollectionReplaced: it is not there."""
        if table.source_id not in self._uuids:
            with server_errors(self._dsn):
                self._uuids[table.source_id] = catalog.uuid_of(self._client, table)
        return self._uuids[table.source_id]

    def _fitting(self, name: CollectionName, uuid: bytes, keys: pa.BinaryArray, time: int) -> pa.BinaryArray | None:
        """See :meth:`documents`; ``None``: those of all *keys* are too large to be received."""
        wanted = self._sorted(keys).dictionary_encode()
        first = np.unique(wanted.indices.to_numpy(), return_index=True)[1]
        asked = keys.take(pa.array(first)).to_pylist()
        found: list[pa.BinaryArray] = []
        received = 0
        for some in _shares(asked):
            with closing(self._found(name, uuid, some, time)) as batches:
                for batch in batches:
                    received += batch.nbytes
                    if received > MOST_RECEIVED and len(keys) > 1:
                        self.share = max(LEAST_SHARE, len(keys) // 4)
                        return None
                    found.append(batch)
        if not found:
            return pa.nulls(len(keys), pa.binary())
        documents = pa.concat_arrays(found)
        fitting = MOST_BYTES * len(documents) // max(1, documents.nbytes)
        self.share = max(LEAST_SHARE, min(4 * self.share, fitting, MOST_SHARE))
        places = pc.index_in(wanted.dictionary, value_set=self._sorted(documents))
        places = places.take(wanted.indices)
        sizes = pc.fill_null(pc.binary_length(documents).take(places), 0).to_numpy(zero_copy_only=False)
        fit = int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), MOST_RECEIVED, side="right"))
        return documents.take(places.slice(0, max(1, fit)))  # the same large one may be wanted often

    def _sorted(self, documents: pa.BinaryArray) -> pa.BinaryArray:
        """The keys of documents as bytes; equal keys have equal ones."""
        return self._keys.decode(documents).batch.column(0)

    def _found(self, name: CollectionName, uuid: bytes, keys: list[bytes], time: int) -> Generator[pa.BinaryArray]:
        command: dict[str, Any] = {
            "find": name.name,
            "filter": _filter(keys),
            "hint": {"_id": 1},
            "batchSize": len(keys),
            "readConcern": {"level": "majority", "afterClusterTime": as_timestamp(time)},
            "collectionUUID": Binary(uuid, UUID_SUBTYPE),
        }
        with RawCursor(self._dsn, self._client, name.namespace, command, batch_size=len(keys)) as cursor:
            answer = cursor.opened
            while True:
                if not answer.is_empty:
                    yield documents_of(answer.documents)
                if answer.is_last:
                    return
                following = cursor.next()
                assert following is not None
                answer = following


def documents_of(array: memoryview) -> pa.BinaryArray:
    """The documents of a BSON array, each as it is."""
    parts: list[memoryview] = []
    sizes = [0]
    at, end, digits, limit = 4, len(array) - 1, 1, 10
    while at < end:
        if len(parts) == limit:
            digits, limit = digits + 1, limit * 10
        start = at + 2 + digits  # its type, its number, 0
        size = _SIZE.unpack_from(array, start)[0]
        at = start + size
        parts.append(array[start:at])
        sizes.append(size)
    offsets = np.cumsum(sizes, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(parts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(parts))])


def _shares(keys: list[bytes]) -> Iterator[list[bytes]]:
    """*keys* as questions that are not too large."""
    some: list[bytes] = []
    size = 0
    for key in keys:
        if some and (len(some) == MOST_KEYS or size + len(key) > MOST_KEY_BYTES):
            yield some
            some, size = [], 0
        some.append(key)
        size += len(key)
    if some:
        yield some


def _filter(keys: list[bytes]) -> RawBSONDocument:
    """``{_id: {$in: […]}}`` of the keys of documents; the values go over as they are."""
    values = _document(b"".join(_element(key, b"%d\0" % number) for number, key in enumerate(keys)))
    inner = _document(b"\x04$in\0" + values)
    return RawBSONDocument(_document(b"\x03_id\0" + inner))


def _element(key: bytes, name: bytes) -> bytes:
    """The value of ``_id``, which other fields may stand before in a sharded collection, under another *name*."""
    if key.startswith(b"_id\0", 5):
        return key[4:5] + name + _first_value(key)
    for kind, field, start, stop in elements.elements(key, 0, len(key), 0):
        if field == b"_id":
            return bytes((kind,)) + name + key[start:stop]
    raise SourceProtocolError(
        "The key of an event has no _id.", next_step="Look which version the server has; run: headwater doctor"
    )


def _first_value(key: bytes) -> bytes:
    """The bytes of the value of ``_id``, the first field of *key*: mostly it is the only one."""
    whole = key[9:-1]
    if key[4] in (1, 9, 17, 18):
        return whole[:8]
    if key[4] == 7:
        return whole[:12]
    if key[4] == 16:
        return whole[:4]
    if key[4] == 2:
        return whole[: 4 + _SIZE.unpack_from(whole)[0]]
    if key[4] in (3, 4):
        return whole[: _SIZE.unpack_from(whole)[0]]
    if key[4] == 5:
        return whole[: 5 + _SIZE.unpack_from(whole)[0]]
    if key[4] == 19:
        return whole[:16]
    return whole[:1] if key[4] == 8 else whole[:0] if key[4] in (10, 255, 127) else whole


def _document(elements: bytes) -> bytes:
    return _SIZE.pack(len(elements) + 5) + elements + b"\0"
