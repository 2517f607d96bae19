"""The options of the data source ``headwater`` for reading a table: those of every table, and of a captured one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from headwater.backfill.query import PARALLEL, SINGLE, QueryOptions
from headwater.backfill.since import epoch_since, parse_time
from headwater.sources.open import open_source
from headwater.spark.directories import data_directory
from headwater.spark.errors import InvalidOption
from headwater.spark.option_table import flag, location_of, names_of, number, option, read_options, text_of, word
from headwater.stream.epoch import Epoch
from headwater.stream.errors import EpochError

SOURCE_VARIABLE: Final = "HEADWATER_SOURCE"
SPLIT_ROWS: Final = 100_000
ALL_COLUMNS: Final = "*"
NEWEST: Final = 0
"""As the epoch of a read: the newest one."""
KEPT_TABLES: Final = "tables"
"""The folder of the kept tables in a store that is a folder."""
STOP, IGNORE = "stop", "ignore"
AUTO, NONE = "auto", "none"


def _epoch(name: str, text: str) -> int:
    epoch: int = NEWEST if text.lower() == "newest" else number(1)(name, text)
    return epoch


def _time_ms(name: str, text: str) -> int:
    try:
        return Epoch.from_datetime(parse_time(name, text)).unix_ms
    except EpochError:
        raise InvalidOption(
            f"Received {name}={text!r}, which is before all epochs.", next_step="Write a time from 2021-04-01Z on."
        ) from None


def _since(_: str, text: str) -> str:
    epoch_since(text)
    return text


@dataclass(frozen=True, slots=True)
class TableOptions:
    """The options of a table that is read, captured or upstream."""

    store: str = option(
        "store", location_of, "Where its changes are kept (default: a directory in the user's data directory).", ""
    )
    tables: str = option(
        "tables", location_of, "Folder of the versioned tables (default, of a captured table: tables in the store).", ""
    )
    query: str | None = option("query", text_of, "Name of the stream, under which it keeps what it has read.")
    columns: tuple[str, ...] | None = option(
        "columns", names_of, "Only these, by commas, in this order; * stands for all columns of the table."
    )
    rows_per_second: int | None = option(
        "rowsPerSecond", number(0), "The most to read per second: of history, and of the changes of an upstream table."
    )
    max_rows: int | None = option("maxRows", number(1), "About how many changes a batch has; whole epochs or versions.")
    max_epochs: int | None = option("maxEpochs", number(1), "How many epochs or versions a batch has.")
    parallelism: int = option("parallelism", number(1), "Tasks side by side (default: processors of this machine).", 2)
    preimages: bool = option("preimages", flag, "false: leave out the old rows of updates.", True)
    on_schema_change: str = option(
        "onSchemaChange", word(STOP, IGNORE), "stop when columns change, or ignore it and read the known ones.", STOP
    )
    takeover: bool = option("takeover", flag, "true: end another stream of the same name.", False)

    @classmethod
    def read(cls, given: Mapping[str, str], of: str = "", more: str = "") -> Self:
        """Those that are *given*; see :func:`read_options`. :raises InvalidOption: an unknown option or a bad value."""
        return cls(**({"parallelism": os.cpu_count() or 2} | read_options(cls, given, of, more)))


@dataclass(frozen=True, slots=True)
class SourceOptions(TableOptions):
    """The options of a captured table, read and checked. They travel to tasks.

    :ivar source: empty: a stream writes the store, and there is no database.
    :ivar query: ``None``: the name is derived from the table's.
    :ivar as_of: an epoch, or :data:`NEWEST`. :ivar tables: empty: not given.
    """

    source: str = option(
        "source",
        text_of,
        f"Connection string of the database (default: {SOURCE_VARIABLE} in the environment). A store that a stream"
        " writes needs none.",
        "",
        is_secret=True,
    )
    table: str = option("table", text_of, "The table.", "")
    history: bool = option(
        "history", flag, "true: first the existing rows, as inserts, then changes. false: changes only.", True
    )
    backfill: str = option(
        "backfill", word(PARALLEL, SINGLE), "parallel: splits side by side. single: page by page.", PARALLEL
    )
    split_rows: int | None = option(
        "splitRows", number(1), "About how many rows a split has (default: 100 000; more for a large batch)."
    )
    start_epoch: int | None = option(
        "startEpoch", number(0), "Batch: the changes after this epoch, instead of the table as it is."
    )
    end_epoch: int | None = option("endEpoch", number(0), "Batch: … up to this epoch (default: the newest).")
    as_of: int | None = option("asOfEpoch", _epoch, "Batch: the versioned table as of this epoch, or newest.")
    as_of_ms: int | None = option(
        "asOfTimestamp", _time_ms, "Batch: … as of the newest epoch that was sealed at this time: 2026-05-31T12:00:00Z."
    )
    net: bool = option(
        "net", flag, "Batch, with startEpoch: one record for each key that changed, from the versioned table.", False
    )
    since: str | None = option(
        "since", _since, "Stream: no history; changes from this epoch or time (2026-05-31T12:00:00Z) on."
    )
    on_truncate: str = option("onTruncate", word(STOP, IGNORE), "stop when the table is truncated, or ignore it.", STOP)
    capture: str = option(
        "capture", word(AUTO, NONE), "auto: capture the database if no process does. none: another process must.", AUTO
    )
    slot: str = option("slot", text_of, "The replication slot of such a capture.", "headwater")
    publication: str = option("publication", text_of, "The publication of such a capture.", "headwater")
    pushdown: bool = option("pushdown", flag, "Batch: let Spark's filters run in the database.", False)
    snapshot_seconds: int = option(
        "snapshotSeconds", number(1), "Batch: seconds that a snapshot is kept when no task reads in it.", 600
    )

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """:raises InvalidOption: an unknown option, a value that is not valid, or one that is missing."""
        options = cls.read(given)
        options = replace(options, source=options.source or os.environ.get(SOURCE_VARIABLE, ""))
        if not options.source and not options.store:
            raise InvalidOption(
                "No database was named, and no store that a stream writes.",
                next_step=f"Set option 'source' or {SOURCE_VARIABLE} to postgresql://user@host:5432/database.",
            )
        if not options.table:
            raise InvalidOption("No table was named.", next_step="Set option 'table', for example to public.orders.")
        store = options.store or default_store(options.source)
        tables = options.tables or (str(Path(store) / KEPT_TABLES) if "://" not in store else "")
        options = replace(options, store=store, tables=tables)
        options._check()
        return options

    def _check(self) -> None:
        if self.end_epoch is not None and self.end_epoch < (self.start_epoch or 0):
            raise InvalidOption(f"Received endEpoch={self.end_epoch}, which is before startEpoch={self.start_epoch}.")
        if self.as_of is not None and self.as_of_ms is not None:
            raise InvalidOption("Both asOfEpoch and asOfTimestamp were given.", next_step="Give one of them.")
        if self.is_as_of and (self.reads_changes or self.net):
            raise InvalidOption(
                "The table as of an epoch and changes between epochs were asked for at once.",
                next_step="Set asOfEpoch alone, or startEpoch and endEpoch.",
            )
        if self.net and self.start_epoch is None:
            raise InvalidOption("Net changes need an epoch to begin after.", next_step="Set option startEpoch.")

    @property
    def reads_kept(self) -> bool:
        """Of a batch: from the kept table, not from the database or the log alone."""
        return self.is_as_of or self.net

    @property
    def is_as_of(self) -> bool:
        """Of a batch: the kept table as of an epoch or a time."""
        return self.as_of is not None or self.as_of_ms is not None

    @property
    def reads_changes(self) -> bool:
        """Of a batch: the changes of a range of epochs, not the table as it is."""
        return self.start_epoch is not None or self.end_epoch is not None

    def for_query(self, table: str) -> QueryOptions:
        """The query that reads *table*, by its full name."""
        return QueryOptions(
            store=self.store,
            source=self.source,
            query=self.query or f"spark {table}",
            tables=(table,),
            history=self.history and self.since is None,
            kept=self.tables or None,
            since=self.since,
            backfill=self.backfill,
            split_rows=self.split_rows or SPLIT_ROWS,
            rows_per_second=self.rows_per_second,
            max_rows=self.max_rows,
            max_epochs=self.max_epochs,
        )


def default_store(source: str) -> str:
    """The directory for the changes of one database: the same for every user and password.

    :raises InvalidDsn: no database that can be captured.
    """
    opened = open_source(source, spill=Path())
    try:
        name = re.sub(r"//[^/@]*@", "//", opened.name)
    finally:
        opened.close()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name.rpartition("/")[2])[:40].strip("-")
    return str(data_directory() / "stores" / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
