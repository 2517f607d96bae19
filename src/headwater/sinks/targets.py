"""Targets: where the tables of a query are at its sink. Two tables with one target are refused when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from headwater.sinks.errors import SinkInputError
from headwater.sinks.sink import Sink
from headwater.sources.table import SourceTable


@runtime_checkable
class TargetedSink(Protocol):
    """What a sink has beside that writes each table to a target of its own: a directory, a topic, a table."""

    def target(self, table: SourceTable) -> str:
        """What the target of *table* is called; the same for two tables means that they share it."""
        ...


def check_targets(sink: Sink, tables: Iterable[SourceTable]) -> None:
    """:raises SinkInputError: two of *tables* have one target; both are named."""
    if not isinstance(sink, TargetedSink):
        return
    owners: dict[str, SourceTable] = {}
    for table in tables:
        target = sink.target(table)
        owner = owners.setdefault(target, table)
        if owner.full_name != table.full_name:
            raise SinkInputError(
                f"Tables {owner.full_name} and {table.full_name} have the same target {target} at {sink.name}.",
                next_step="Deliver one of them to another [[sink]] (its key `tables` says which), or change the option"
                " that names the targets.",
            )
