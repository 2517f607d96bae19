"""The options of the data source ``headwater``, as Spark gives them: texts under names in any case.

====================  ==========================================================================================
option                meaning
====================  ==========================================================================================
``source``            connection string of the database; by default that of ``HEADWATER_SOURCE`` in the environment.
                      A store that a stream writes needs none
``table``             the table
``store``             where its changes are kept; by default a directory for this database in the user's data directory
``query``             name of the stream: what it has read is kept under it; by default made of the table's name
``columns``           only these, by commas, in this order; ``*`` stands for all columns of the table
``history``           ``true``: first the rows that are there (as inserts), then changes. ``false``: changes only
``backfill``          ``parallel``: splits of the history side by side. ``single``: one page after the other
``splitRows``         about how many rows a split has; by default 100 000, in a batch more where there are many
``rowsPerSecond``     the most history to read per second
``parallelism``       how many tasks run side by side; by default as many as this machine has processors
``maxRows``           about how many changes a batch has; whole epochs, one at least
``maxEpochs``         … and epochs
``startEpoch``        batch: the changes after this epoch, up to ``endEpoch``, instead of the table as it is
``endEpoch``          batch: by default the newest
``asOfEpoch``         batch: the kept table as of this epoch; ``newest``: as of the newest. It needs no ``source``
``asOfTimestamp``     batch: … as of the newest epoch that was sealed at this time: ``2026-05-31T12:00:00Z``
``net``               batch, with ``startEpoch``: one record for each key that changed, from the kept table
``tables``            where the kept tables are; by default the folder of that name in the store
``since``             stream: no history, and changes from this epoch or time on: ``2026-05-31T12:00:00Z``
``preimages``         ``false``: leave out the old rows of updates
``onTruncate``        ``stop`` when the table is truncated, or ``ignore`` it
``onSchemaChange``    ``stop`` when columns come, go or change, or ``ignore`` it and go on with those that are known
``capture``           ``auto``: follow the database if nobody else does. ``none``: somebody must
``slot``              the replication slot of such a capture. ``publication``: its publication
``takeover``          ``true``: end another stream of the same name
``pushdown``          batch: let Spark's filters run in the database
``snapshotSeconds``   batch: how long a snapshot is kept when no task reads in it
====================  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.query import PARALLEL, SINGLE, QueryOptions
from headwater.backfill.since import parse_since
from headwater.sources.open import open_source
from headwater.spark.directories import data_directory
from headwater.spark.errors import InvalidOption
from headwater.spark.option_texts import OptionTexts
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

NAMES: Final = (
    "source",
    "table",
    "store",
    "query",
    "columns",
    "history",
    "backfill",
    "splitRows",
    "rowsPerSecond",
    "parallelism",
    "maxRows",
    "maxEpochs",
    "startEpoch",
    "endEpoch",
    "asOfEpoch",
    "asOfTimestamp",
    "net",
    "tables",
    "since",
    "preimages",
    "onTruncate",
    "onSchemaChange",
    "capture",
    "slot",
    "publication",
    "takeover",
    "pushdown",
    "snapshotSeconds",
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options, read and checked. They travel to tasks.

    :ivar source: never shown; empty: a stream writes the store, and there is no database.
    :ivar query: ``None``: made of the table's name.
    :ivar split_rows: ``None``: as many as suit; of a stream :data:`SPLIT_ROWS`.
    :ivar columns: ``None``: all, and those that we add; see :data:`ALL_COLUMNS`.
    :ivar as_of: an epoch, or :data:`NEWEST`. :ivar as_of_ms: … or a time, in milliseconds since 1970.
    :ivar tables: the folder of the kept tables; empty: it was not told.
    """

    source: str = field(repr=False)
    table: str
    store: str
    query: str | None = None
    columns: tuple[str, ...] | None = None
    history: bool = True
    backfill: str = PARALLEL
    split_rows: int | None = None
    rows_per_second: int | None = None
    parallelism: int = 2
    max_rows: int | None = None
    max_epochs: int | None = None
    start_epoch: int | None = None
    end_epoch: int | None = None
    as_of: int | None = None
    as_of_ms: int | None = None
    net: bool = False
    tables: str = ""
    since: str | None = None
    preimages: bool = True
    on_truncate: str = STOP
    on_schema_change: str = STOP
    capture: str = AUTO
    slot: str = "headwater"
    publication: str = "headwater"
    takeover: bool = False
    pushdown: bool = False
    snapshot_seconds: int = 600

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """:raises InvalidOption: an option that there is not, a value that it cannot have, or one that is missing."""
        return _Texts(given).options()

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


class _Texts(OptionTexts):
    """Reads the values of options."""

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__(given, NAMES)

    def options(self) -> SourceOptions:
        source = self._given.get("source") or os.environ.get(SOURCE_VARIABLE, "")
        if not source and not self._given.get("store"):
            raise InvalidOption(
                "No database was named, and no store that a stream writes.",
                next_step=f"Set option 'source' or {SOURCE_VARIABLE} to postgresql://user@host:5432/database.",
            )
        table = self._given.get("table", "")
        if not table:
            raise InvalidOption("No table was named.", next_step="Set option 'table', for example to public.orders.")
        store = absolute(self._given.get("store", "")) or default_store(source)
        made = SourceOptions(
            source=source,
            table=table,
            store=store,
            query=self._given.get("query") or None,
            columns=self._columns(),
            history=self._flag("history", True),
            backfill=self._word("backfill", PARALLEL, SINGLE),
            split_rows=self._number("splitRows", 1),
            rows_per_second=self._number("rowsPerSecond", 0),
            parallelism=self._number("parallelism", 1) or os.cpu_count() or 2,
            max_rows=self._number("maxRows", 1),
            max_epochs=self._number("maxEpochs", 1),
            start_epoch=self._number("startEpoch", 0),
            end_epoch=self._number("endEpoch", 0),
            as_of=self._as_of(),
            as_of_ms=self._as_of_ms(),
            net=self._flag("net", False),
            tables=self._tables(store),
            since=self._since(),
            preimages=self._flag("preimages", True),
            on_truncate=self._word("onTruncate", STOP, IGNORE),
            on_schema_change=self._word("onSchemaChange", STOP, IGNORE),
            capture=self._word("capture", AUTO, NONE),
            slot=self._given.get("slot") or "headwater",
            publication=self._given.get("publication") or "headwater",
            takeover=self._flag("takeover", False),
            pushdown=self._flag("pushdown", False),
            snapshot_seconds=self._number("snapshotSeconds", 1) or 600,
        )
        if made.end_epoch is not None and made.end_epoch < (made.start_epoch or 0):
            raise InvalidOption(f"Received endEpoch={made.end_epoch}, which is before startEpoch={made.start_epoch}.")
        if made.as_of is not None and made.as_of_ms is not None:
            raise InvalidOption("Both asOfEpoch and asOfTimestamp were given.", next_step="Give one of them.")
        if made.is_as_of and (made.reads_changes or made.net):
            raise InvalidOption(
                "The table as of an epoch and changes between epochs were asked for at once.",
                next_step="Set asOfEpoch alone, or startEpoch and endEpoch.",
            )
        if made.net and made.start_epoch is None:
            raise InvalidOption("Net changes need an epoch to begin after.", next_step="Set option startEpoch.")
        return made

    def _as_of(self) -> int | None:
        is_newest = self._given.get("asOfEpoch", "").lower() == "newest"
        return NEWEST if is_newest else self._number("asOfEpoch", 1)

    def _as_of_ms(self) -> int | None:
        time = self._given.get("asOfTimestamp")
        if not time:
            return None
        try:
            return Epoch.from_datetime(datetime.fromisoformat(time)).unix_ms
        except (ValueError, EpochError):
            raise InvalidOption(
                f"Received asOfTimestamp={time!r}.",
                next_step="Write a time with its zone, for example 2026-05-31T12:00:00Z.",
            ) from None

    def _since(self) -> str | None:
        text = self._given.get("since") or None
        if text is not None:
            try:
                parse_since(text)
            except InvalidQuery as error:
                raise InvalidOption(error.message, next_step=error.next_step) from None
        return text

    def _tables(self, store: str) -> str:
        given = self._given.get("tables", "")
        return absolute(given) or (str(Path(store) / KEPT_TABLES) if "://" not in store else "")

    def _columns(self) -> tuple[str, ...] | None:
        return names_of("columns", self._given.get("columns", ""))


def names_of(option: str, text: str) -> tuple[str, ...] | None:
    """Names by commas; one in double quotes may have commas, and two of them for each of its own.

    :raises InvalidOption: it is no such list.
    """
    if not text:
        return None
    if not re.fullmatch(r'\s*("([^"]|"")+"|[^",]+)(,\s*("([^"]|"")+"\s*|[^",]+))*', text):
        raise InvalidOption(f"Option {option!r} is no list of names by commas.", next_step="Write id, name.")
    found = re.findall(r'\s*(?:"((?:[^"]|"")+)"\s*|([^",]+))(?:,|$)', text)
    return tuple(quoted.replace('""', '"') if quoted else plain.strip() for quoted, plain in found)


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


def absolute(location: str) -> str:
    """A path that means the same in every process; a URL as it is."""
    return location if not location or "://" in location else str(Path(location).expanduser().absolute())
