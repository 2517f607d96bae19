"""The options of the data source ``headwater`` for a stream of an upstream table, as Spark gives them.

====================  ==========================================================================================
option                meaning
====================  ==========================================================================================
``upstream``          ``delta:PATH``: a Delta table. ``table:NAME``: one that a pipeline of ours keeps
``key``               Delta: the columns that name a row, by commas
``table``             Delta: ``namespace.name`` of its rows downstream; by default ``lake.`` and its directory
``vnodes``            Delta: into how many its rows are hashed; it stays so for a query
``storage.NAME``      Delta in an object store: an option of its storage
``store``             where the query keeps its state; by default a directory for this table in the user's data
                      directory. Of a kept table: the store of its log
``tables``            of a kept table: the folder of the kept tables
``query``             name of the stream: what it has read is kept under it; by default made of the table's name
``columns``           only these, by commas, in this order; ``*`` stands for all columns of the table
``since``             no snapshot: what changed after a version (a number), or from a time on (ISO 8601)
``rowsPerSecond``     the most to read per second, of the snapshot and of the change log
``maxRows``           about how many rows a batch has
``maxEpochs``         … and versions
``parallelism``       how many tasks run side by side; by default as many as this machine has processors
``preimages``         ``false``: leave out the old rows of updates
``onSchemaChange``    ``stop`` when columns come, go or change, or ``ignore`` it and go on with those that are known
``onResnapshot``      ``stop`` when the table is read once more, or ``ignore`` that rows of before are void
``takeover``          ``true``: end another stream of the same name
====================  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from headwater.backfill.snapshot.consume_upstream.executor import UpstreamOptions
from headwater.backfill.snapshot.consume_upstream.open import DELTA, open_upstream
from headwater.backfill.snapshot.consume_upstream.query import UpstreamQuery
from headwater.spark.directories import data_directory
from headwater.spark.errors import InvalidOption
from headwater.spark.option_texts import OptionTexts
from headwater.spark.options import IGNORE, STOP, absolute, names_of
from headwater.stream import DEFAULT_VNODE_COUNT

UPSTREAM: Final = "upstream"
STORAGE: Final = "storage."
NAMES: Final = (
    UPSTREAM,
    "key",
    "table",
    "vnodes",
    "store",
    "tables",
    "query",
    "columns",
    "since",
    "rowsPerSecond",
    "maxRows",
    "maxEpochs",
    "parallelism",
    "preimages",
    "onSchemaChange",
    "onResnapshot",
    "takeover",
)


def is_upstream(given: Mapping[str, str]) -> bool:
    """Whether the options are those of an upstream table."""
    return any(name.lower() == UPSTREAM for name in given)


@dataclass(frozen=True, slots=True)
class UpstreamSourceOptions:
    """The options, read and checked. They travel to tasks."""

    query: UpstreamQuery
    columns: tuple[str, ...] | None = None
    preimages: bool = True
    on_schema_change: str = STOP
    on_resnapshot: str = STOP
    takeover: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> UpstreamSourceOptions:
        """:raises InvalidOption: an option that there is not, or a value that it cannot have.
        :raises InvalidUpstream: no such table can be opened.
        """
        return _Texts(given).options()


class _Texts(OptionTexts):
    """Reads the values of options."""

    def __init__(self, given: Mapping[str, str]) -> None:
        of_storage = {name for name in given if name.lower().startswith(STORAGE)}
        # Spark gives names in lower case
        self._storage = {name[len(STORAGE) :].upper(): str(given[name]) for name in of_storage}
        own = {name: value for name, value in given.items() if name not in of_storage}
        super().__init__(own, NAMES, " of an upstream table", f", and {STORAGE}…")

    def options(self) -> UpstreamSourceOptions:
        get = self._given.get
        name = get(UPSTREAM, "")
        store = absolute(get("store", "")) or default_state(name)
        upstream = open_upstream(
            name,
            key=names_of("key", get("key", "")) or (),
            table=get("table", ""),
            vnodes=self._number("vnodes", 1) or DEFAULT_VNODE_COUNT,
            store=store if not name.startswith(f"{DELTA}:") else "",
            folder=absolute(get("tables", "")),
            storage=self._storage,
        )
        limits = UpstreamOptions(rows_per_second=self._number("rowsPerSecond", 0))
        limits = replace(
            limits,
            batch_rows=self._number("maxRows", 1) or limits.batch_rows,
            batch_epochs=self._number("maxEpochs", 1) or limits.batch_epochs,
        )
        since, since_ms = self._since()
        query = UpstreamQuery(
            upstream,
            store,
            get("query") or f"spark {upstream.name.rpartition('/')[2]}",
            since=None if since is None else upstream.epoch_of_version(since),
            since_ms=since_ms,
            parallelism=self._number("parallelism", 1) or os.cpu_count() or 2,
            options=limits,
        )
        return UpstreamSourceOptions(
            query,
            names_of("columns", get("columns", "")),
            self._flag("preimages", True),
            self._word("onSchemaChange", STOP, IGNORE),
            self._word("onResnapshot", STOP, IGNORE),
            self._flag("takeover", False),
        )

    def _since(self) -> tuple[int | None, int | None]:
        text = self._given.get("since", "")
        if not text:
            return None, None
        if text.isdecimal():
            return int(text), None
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidOption(
                f"Received since={text!r}.", next_step="Valid are a version, or a time as 2026-01-31T12:00:00Z."
            ) from None
        at = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return None, int(at.timestamp() * 1000)


def default_state(upstream: str) -> str:
    """The directory for the state of queries over one table."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", upstream.rpartition("/")[2])[:40].strip("-")
    name = f"{readable}-{hashlib.sha256(upstream.encode()).hexdigest()[:12]}"
    return str(data_directory() / "upstreams" / name)
