"""Splitting: where to cut a collection so that its parts have about the same number of documents.

==================================  ==================================================================================
up to 1,000,000 documents           every n-th key, exactly, by steps along the index of ``_id``
more                                keys of a random sample, at equal distances: as many keys lie between two cuts,
                                    about, wherever they are crowded; no document is read for it but those of the sample
==================================  ==================================================================================

Cuts are keys that are there, of any type. The first split has no start and the last no end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from bson.errors import BSONError

from headwater.sources.errors import UnsupportedTable
from headwater.sources.mongodb.connection import Client
from headwater.sources.mongodb.documents.errors import UnreadableKey
from headwater.sources.mongodb.key_values import CODEC, order_key, text_of
from headwater.sources.mongodb.part import finds, read_concern
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

STEPPED: Final = 1_000_000
PER_SPLIT: Final = 40
"""Keys of the sample for each split."""
MOST_SAMPLED: Final = 100_000


def plan_splits(client: Client, table: SourceTable, at: int, split_rows: int, kind: SplitKind | None) -> SplitPlan:
    """Splits of about *split_rows* documents of *table*. :raises UnsupportedTable: by heap."""
    if kind is SplitKind.HEAP:
        raise UnsupportedTable(
            table.full_name,
            "its documents have no place but their key.",
            next_step="Set split_kind to key, or leave it out.",
        )
    rows, size = _extent(client, table)
    if split_rows >= rows > STEPPED:
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), rows),), rows, size, "1 range: all of it.")
    if rows <= STEPPED:
        cuts = _stepped(client, table, at, split_rows)
        why = f"{len(cuts) + 1} ranges of keys: every {split_rows:,}th, by steps along the index of _id."
    else:
        cuts = _sampled(client, table, rows, split_rows)
        why = f"{len(cuts) + 1} ranges of keys: between those of a random sample, at equal distances."
    ends = [None, *(Cut((text,)) for text in cuts), None]
    each = max(1, rows // (len(cuts) + 1))
    splits = tuple(Split(number, KeyRange(*pair), each) for number, pair in enumerate(pairwise(ends)))
    return SplitPlan(SplitKind.KEY, splits, rows, size, why)


def page_end(client: Client, table: SourceTable, at: int, part: KeyRange, rows: int) -> Cut | None:
    """The cut after the first *rows* documents of *part*; ``None`` when it has no more than that, or one more."""
    command = next(finds(table.name, part), None)
    found = [] if command is None or "sort" not in command else _keys(client, table, at, command, rows)
    return Cut((found[0],)) if found else None


def _keys(client: Client, table: SourceTable, at: int, command: dict[str, Any], skipped: int) -> list[str]:
    """The key of the document after the first *skipped*, if there is one."""
    with _readable(table):
        answer = client[table.namespace].command(
            {
                **command,
                "projection": {"_id": 1},
                "skip": skipped,
                "limit": 1,
                "singleBatch": True,
                "readConcern": read_concern(at),
            },
            codec_options=CODEC,
        )
    return [text_of(document["_id"]) for document in answer["cursor"]["firstBatch"]]


def _extent(client: Client, table: SourceTable) -> tuple[int, int]:
    """About how many documents and bytes it has, by the server's statistics."""
    pipeline: list[dict[str, Any]] = [{"$collStats": {"storageStats": {}}}]
    rows = size = 0
    for answer in client[table.namespace][table.name].aggregate(pipeline):  # one of each shard
        rows += int(answer["storageStats"].get("count", 0))
        size += int(answer["storageStats"].get("size", 0))
    return rows, size


def _stepped(client: Client, table: SourceTable, at: int, split_rows: int) -> list[str]:
    cuts: list[str] = []
    while True:
        part = KeyRange(Cut((cuts[-1],)) if cuts else None)
        command = next(finds(table.name, part))
        found = _keys(client, table, at, command, split_rows)
        if not found:
            return cuts
        cuts.append(found[0])


def _sampled(client: Client, table: SourceTable, rows: int, split_rows: int) -> list[str]:
    count = -(-rows // split_rows)
    size = min(MOST_SAMPLED, PER_SPLIT * count)
    pipeline = [{"$sample": {"size": size}}, {"$project": {"_id": 1}}]
    collection = client[table.namespace].get_collection(table.name, codec_options=CODEC)
    with _readable(table):
        found = sorted({text_of(document["_id"]) for document in collection.aggregate(pipeline)}, key=order_key)
    return at_equal_distances(found, count)


@contextmanager
def _readable(table: SourceTable) -> Iterator[None]:
    """:raises UnreadableKey: an answer has a key that is no value."""
    try:
        yield
    except BSONError:
        raise UnreadableKey(table.full_name, "a text that is not UTF-8") from None


def at_equal_distances(keys: Sequence[str], count: int) -> list[str]:
    """Of ascending *keys* those that divide them into *count* parts of the same number, or fewer where keys lack."""
    places = sorted({place * len(keys) // count for place in range(1, count)} - {0})
    return [keys[place] for place in places]
