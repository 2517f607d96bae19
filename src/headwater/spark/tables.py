"""The table that a query names: as its log has it, or as the database has it when there is no log yet."""

from __future__ import annotations

from pathlib import Path

from headwater.backfill.log_ranges import LogRanges
from headwater.capture.source_state import SourceState, TableState
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable
from headwater.spark.errors import NoCapture
from headwater.spark.options import SourceOptions
from headwater.state import StateReader, open_reader
from headwater.state.errors import StoreNotFound


def find_table(options: SourceOptions) -> SourceTable:
    """The table with its newest columns.

    :raises SourceNotFound: the database has no such table. :raises UnsupportedTable: it cannot be captured.
    """
    return logged_table(options) or source_table(options)


def logged_table(options: SourceOptions) -> SourceTable | None:
    """As its log has it; ``None`` when there is none.

    :raises NoCapture: its capture has stopped.
    """
    try:
        with open_reader(options.store) as reader:
            return _logged(reader, options.table)
    except StoreNotFound:
        return None


def _logged(reader: StateReader, wanted: str) -> SourceTable | None:
    with reader.snapshot() as view:
        _, captured = SourceState.read(view)
        name = next((name for name in (wanted, f"public.{wanted}") if name in captured), None)
        if name is None:
            return None
        known = captured[name]
        if known.state is TableState.STOPPED:
            raise NoCapture(f"Table {name} is captured no longer: {known.reason}")
        newest = view.epoch
        return LogRanges(view, [name]).changes(name, newest, newest).table


def source_table(options: SourceOptions) -> SourceTable:
    """As the database has it now."""
    source = open_source(options.source, spill=Path())
    try:
        return source.tables([options.table])[0]
    finally:
        source.close()
