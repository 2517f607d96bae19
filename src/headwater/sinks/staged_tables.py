"""The staged parts of a batch, by table: what commits them, what of them survives a crash, why a table cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import pyarrow as pa

from headwater.sinks.errors import SinkRowError, SinkSchemaError
from headwater.sinks.sink import Sink, Staged
from headwater.sinks.staged_codec import NotStorable, encode
from headwater.sources.errors import RefusedValue, UnsupportedTable
from headwater.sources.table import SourceTable

_LARGEST_STAGED: Final = 16 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TableFailure:
    """Why one table cannot be delivered; it can be pickled."""

    table: SourceTable
    reason: str
    next_step: str | None = None

    @classmethod
    def of(cls, table: SourceTable, error: BaseException) -> Self | None:
        """``None``: *error* is not about the table alone."""
        if isinstance(error, pa.ArrowInvalid | pa.ArrowTypeError | pa.ArrowNotImplementedError | pa.ArrowKeyError):
            reason = f"Values of {table.full_name} do not fit into the columns of the sink ({type(error).__name__})."
            return cls(table, reason)
        if not isinstance(error, SinkSchemaError | SinkRowError | UnsupportedTable | RefusedValue):
            return None
        return cls(table, error.message, error.next_step)


def by_table_of(staged: Sequence[Staged]) -> dict[str, list[Staged]]:
    """By the names of their tables."""
    found: dict[str, list[Staged]] = {}
    for one in staged:
        found.setdefault(one.table.full_name, []).append(one)
    return found


def commit_tables(sink: Sink, by_table: Mapping[str, Sequence[Staged]]) -> dict[str, tuple[SourceTable, BaseException]]:
    """Commit each table; one that fails does not keep the others. Those that failed, and why."""
    failed: dict[str, tuple[SourceTable, BaseException]] = {}

    def commit(name: str, parts: Sequence[Staged]) -> None:
        try:
            _commit_table(sink, parts)
        except Exception as error:
            failed[name] = (parts[0].table, error)

    each(list(by_table.items()), lambda one: commit(*one), sink.capabilities.connections)
    return failed


def each(values: Sequence[T], function: Callable[[T], None], most: int) -> None:
    """Call *function* with each of *values*, up to *most* at a time; what it raises is raised when all have ended."""
    if len(values) < 2:
        for value in values:
            function(value)
        return
    with ThreadPoolExecutor(min(most, len(values)), "headwater-commit") as threads:
        calls = [threads.submit(function, value) for value in values]
    for call in calls:
        call.result()


def _commit_table(sink: Sink, staged: Sequence[Staged]) -> None:
    token = max((one.token for one in staged), key=lambda one: one.attempt)
    sink.commit(staged[0].table, token, staged)


def is_there(sink: Sink, staged: Sequence[Staged]) -> bool:
    """Whether the sink's token has come to this batch: not if it had the truncation, and there was nothing more."""
    token, table = staged[0].token, staged[0].table
    if any(one.rows for one in staged if not one.is_snapshot):
        return True
    return sink.committed(table, token.query, token.backfill).epoch >= token.epoch


def has_changes(staged: Staged) -> bool:
    """Whether it has more than history."""
    return not staged.is_snapshot and (staged.rows > 0 or staged.truncated)


def packed(staged: Sequence[Staged]) -> bytes:
    """What a later process needs to commit it; nothing if it is too large, holds secrets, or cannot be encoded."""
    if any(one.detail.get("order") is not None for one in staged):  # it knows the address of the source
        return b""
    try:
        data = encode(staged)
    except NotStorable:
        return b""
    return data if len(data) <= _LARGEST_STAGED else b""
