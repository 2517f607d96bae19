"""Reads collections: which there are, whether they can be captured, and what columns they are given.

A collection has no columns of its own. They are settled when its capture begins, as the settings of the table say:

==========================  ============================================================================
``inferred``                from a sample of its documents, with ``_rest`` for what no column takes (the default)
``document``                the key, and the whole document as text
``struct<name: type, …>``   these
==========================  ============================================================================

See :mod:`headwater.sources.mongodb.documents`. ``source_id`` is made of the collection's UUID: one that was dropped and
made anew is another one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.sources.errors import SourceMisconfigured, SourceNotFound, UnsupportedTable
from headwater.sources.mongodb.connection import RAW, Client, CollectionReplaced
from headwater.sources.mongodb.documents.columns import (
    CollectionColumns,
    declared_columns,
    document_columns,
    inferred_columns,
)
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.table import SourceTable, SpecialValues

SYSTEM: Final = ("admin", "config", "local")
INFERRED: Final = "inferred"
DOCUMENT: Final = "document"
_COLUMN: Final = re.compile(r"\s*(?:`([^`]+)`|([^\s:`]+))\s*:")
_CAPPED_READ: Final = (8, 0)
SAMPLE: Final = 1000
"""Documents whose fields make the columns."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection as the server lists it.

    :ivar kind: ``collection``, ``view`` or ``timeseries``.
    :ivar uuid: empty where it has none.
    :ivar has_images: the server keeps documents as they were before and after each change.
    :ivar is_capped: it has a greatest size, and loses its oldest documents.
    """

    name: CollectionName
    kind: str
    uuid: bytes
    has_images: bool
    collation: str = ""
    is_capped: bool = False

    @classmethod
    def of(cls, namespace: str, listed: Mapping[str, Any]) -> Collection:
        options = listed.get("options", {})
        images = options.get("changeStreamPreAndPostImages", {}).get("enabled", False)
        collation = options.get("collation", {}).get("locale", "")
        uuid = bytes(listed.get("info", {}).get("uuid", b""))
        name, kind = CollectionName(namespace, listed["name"]), listed.get("type", "collection")
        return cls(name, kind, uuid, bool(images), collation, bool(options.get("capped", False)))

    @property
    def source_id(self) -> int | None:
        """The high bits of its UUID."""
        return int.from_bytes(self.uuid[:8], "big") >> 1 if self.uuid else None

    def require_capturable(self) -> None:
        """:raises UnsupportedTable: its changes are not logged, or its keys have an order that is not known here."""
        if self.kind != "collection" or self.name.name.startswith("system."):
            what = {"view": "a view", "timeseries": "a time series"}.get(self.kind, "a collection of the server's own")
            raise UnsupportedTable(
                str(self.name),
                f"it is {what}, whose changes no server logs.",
                next_step="Replace it with a collection.",
            )
        if self.collation not in ("", "simple"):
            raise UnsupportedTable(
                str(self.name),
                f"its keys are compared by the collation {self.collation!r}, and not by their bytes.",
                next_step="Replace it with a collection that has the simple collation.",
            )

    def require_history(self, version: Sequence[int]) -> None:
        """:raises UnsupportedTable: a server of *version* does not show its documents as they were at a time."""
        if self.is_capped and tuple(version[:2]) < _CAPPED_READ:
            raise UnsupportedTable(
                str(self.name),
                "it is capped, and before MongoDB 8.0 no snapshot shows a capped collection.",
                next_step="Upgrade the server to MongoDB 8.0, or capture a collection that is not capped.",
            )


def require_capturable(client: Client, collection: Collection) -> None:
    """:raises UnsupportedTable: it cannot be captured from this server."""
    collection.require_capturable()
    if collection.is_capped:
        collection.require_history(client.server_info()["versionArray"])


def collections(client: Client, namespace: str) -> Iterator[Collection]:
    """Those of one database that are not the server's own."""
    for listed in client[namespace].list_collections():
        if not listed["name"].startswith("system."):
            yield Collection.of(namespace, listed)


def all_collections(client: Client, database: str) -> list[Collection]:
    """Those of *database*; of all databases where it is empty."""
    names = [database] if database else [name for name in client.list_database_names() if name not in SYSTEM]
    return sorted((one for name in names for one in collections(client, name)), key=lambda one: one.name)


def present(client: Client, names: Sequence[CollectionName]) -> dict[CollectionName, Collection]:
    """Those of *names* that there are."""
    found: dict[CollectionName, Collection] = {}
    for namespace in dict.fromkeys(name.namespace for name in names):
        wanted = [name.name for name in names if name.namespace == namespace]
        for listed in client[namespace].list_collections(filter={"name": {"$in": wanted}}):
            one = Collection.of(namespace, listed)
            found[one.name] = one
    return found


def uuid_of(client: Client, table: SourceTable) -> bytes:
    """The UUID of the collection that *table* was made of. :raises CollectionReplaced: it is not there any more."""
    name = CollectionName(table.namespace, table.name)
    found = present(client, [name]).get(name)
    if found is None or found.source_id != table.source_id:
        raise CollectionReplaced(f"Collection {name} was dropped.", next_step=f"Run: headwater resnapshot {name}")
    return found.uuid


def find(client: Client, name: CollectionName) -> Collection:
    """:raises SourceNotFound: there is none of that name."""
    found = present(client, [name]).get(name)
    if found is None:
        near = difflib.get_close_matches(name.name, [one.name.name for one in collections(client, name.namespace)], 1)
        step = f"Did you mean {CollectionName(name.namespace, near[0])}?" if near else "Create it, or name another."
        raise SourceNotFound(f"There is no collection {name}.", next_step=step)
    return found


def describe(
    client: Client, collection: Collection, columns: str, special_values: Mapping[str, SpecialValues]
) -> SourceTable:
    """The table that *collection* is here.

    :param columns: as above. :param special_values: policies by column.
    :raises UnsupportedTable: it cannot be captured. :raises InputError: it cannot have such columns.
    """
    require_capturable(client, collection)
    name = collection.name
    made = _columns(client, name, columns, special_values)
    return SourceTable(name.namespace, name.name, made.columns, made.key_columns, collection.source_id)


def _columns(
    client: Client, name: CollectionName, columns: str, special_values: Mapping[str, SpecialValues]
) -> CollectionColumns:
    if columns == INFERRED:
        return inferred_columns(sample(client, name), special_values)
    if columns == DOCUMENT:
        return document_columns(sample(client, name))
    types = declared(columns)
    if types is None:
        raise SourceMisconfigured(
            f"The columns of collection {name} are declared as {columns!r}.",
            next_step="Write inferred, document, or struct<_id: objectId, total: decimal(12,2), …>.",
        )
    return declared_columns(types, () if "_id" in types else sample(client, name), special_values)


def declared(columns: str) -> dict[str, str] | None:
    """The types of ``struct<name: type, …>`` by name, as they stand there; ``None``: it is no such text.

    >>> declared("struct<_id: key, `first name`: string, lines: array<struct<n: int, price: int>>, more: rest>")
    {'_id': 'key', 'first name': 'string', 'lines': 'array<struct<n: int, price: int>>', 'more': 'rest'}
    """
    text = columns.strip()
    if not (text.startswith("struct<") and text.endswith(">")):
        return None
    types: dict[str, str] = {}
    rest = text[len("struct<") : -1]
    while rest.strip():
        found = _COLUMN.match(rest)
        if found is None:
            return None
        end = _type_end(rest, found.end())
        name, kind = found[1] or found[2], rest[found.end() : end].strip()
        if name in types or not kind:
            return None
        types[name] = kind
        rest = rest[end + 1 :]
    return types or None


def _type_end(text: str, start: int) -> int:
    """Where the comma is that ends a type, or the end."""
    depth = 0
    is_quoted = False
    for place in range(start, len(text)):
        sign = text[place]
        if sign == "`":
            is_quoted = not is_quoted
        elif not is_quoted and sign == "," and not depth:
            return place
        elif not is_quoted:
            depth += (sign in "<(") - (sign in ">)")
    return len(text)


def sample(client: Client, name: CollectionName, size: int = SAMPLE) -> list[bytes]:
    """Documents of a collection, at random, raw."""
    pipeline = [{"$sample": {"size": size}}]
    collection: Any = client[name.namespace].get_collection(name.name, codec_options=RAW)
    return [bytes(document.raw) for document in collection.aggregate(pipeline)]
