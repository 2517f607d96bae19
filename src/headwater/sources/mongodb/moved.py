"""Documents that a transaction deleted on one shard and that live on, on another: an update of their shard key.

To the log of a cluster it is a delete here and an insert there, each at a time of its own, and the insert may come
first: whoever followed the delete then would lose the document. So the deletes of transactions are looked up. Where the
document is there, and its shard key is not the one that was deleted, the delete is not told; its insert is. Pure.
"""

from __future__ import annotations

from headwater.sources.mongodb.documents.elements import ARRAY, OBJECT, document_end, elements
from headwater.sources.mongodb.documents.key_order import value_key


def has_moved(key: bytes, document: bytes) -> bool:
    """Whether *document* may be what became of the one that was deleted.

    :param key: ``documentKey`` of the delete: the fields of the shard key that the document had, and ``_id``. Where it
        had none of them nobody can tell, and it may.
    :param document: the one that has its ``_id`` now.
    :raises ValueError: these are no documents.
    """
    parts = [
        (name, value_key(key, kind, start, stop, 0))
        for kind, name, start, stop in elements(key, 0, document_end(key, 0, len(key)), 0)
        if name != b"_id"
    ]
    return not parts or any(_value_at(document, name) != value for name, value in parts)


def _value_at(document: bytes, path: bytes) -> bytes | None:
    """The value at a path with points, as bytes that are equal where the values are; ``None``: there is none."""
    at, end = 0, document_end(document, 0, len(document))
    *outer, last = path.split(b".")
    for depth, name in enumerate(outer):
        found = _field(document, at, end, name, depth)
        if found is None or found[0] not in (OBJECT, ARRAY):
            return None
        _, at, end = found
    found = _field(document, at, end, last, len(outer))
    return None if found is None else value_key(document, *found, len(outer))


def _field(document: bytes, at: int, end: int, wanted: bytes, depth: int) -> tuple[int, int, int] | None:
    """Type and place of the first field of a name."""
    for kind, name, start, stop in elements(document, at, end, depth):
        if name == wanted:
            return kind, start, stop
    return None
