"""The table that a query names: as its log has it, or as the database has it when there is no log yet.

A store that a stream writes has no database: then there is the log, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headwater.backfill.log_ranges import LogRanges
from headwater.capture.source_state import SourceState, TableState
from headwater.capture.stream_log import is_written_by_stream
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable
from headwater.spark.errors import NoCapture
from headwater.spark.options import NONE, SourceOptions
from headwater.state import StateReader, open_reader
from headwater.state.errors import StoreNotFound


def settled(options: SourceOptions) -> SourceOptions:
    """*options* as they hold for their store: one that a stream writes has no source and no history.

    :raises NoCapture: no database was named, and there is no such store.
    """
    if options.reads_kept:
        return options
    if is_stream_store(options.store):
        return replace(options, source="", history=False, capture=NONE)
    if not options.source:
        raise NoCapture(
            f"No database was named, and no stream has written to {options.store} yet.",
            next_step="Start the stream that writes it, or set option 'source' to postgresql://user@host:5432/database.",
        )
    return options


def is_stream_store(location: str) -> bool:
    """Whether a stream writes the store at *location*."""
    try:
        with open_reader(location) as reader, reader.snapshot() as view:
            return is_written_by_stream(view)
    except StoreNotFound:
        return False


def find_table(options: SourceOptions) -> SourceTable:
    """The table with its newest columns.

    :raises SourceNotFound: the database has no such table. :raises UnsupportedTable: it cannot be captured.
    """
    table = logged_table(options)
    if table is None and not options.source:
        raise no_table(options)
    return table or source_table(options)


def no_table(options: SourceOptions) -> NoCapture:
    """What is raised when the stream that writes a store writes another table."""
    with open_reader(options.store) as reader, reader.snapshot() as view:
        _, captured = SourceState.read(view)
    return NoCapture(
        f"The store at {options.store} has no table {options.table}.", next_step=f"It has {', '.join(captured)}."
    )


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
