"""The options of the data source ``headwater`` for a stream of an upstream table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from headwater.backfill.query import QueryOptions
from headwater.backfill.since import parse_since
from headwater.backfill.snapshot.consume_upstream.upstream_table import DELTA, open_upstream
from headwater.spark.directories import data_directory
from headwater.spark.option_table import location_of, names_of, number, option, text_of, word
from headwater.spark.options import IGNORE, STOP, TableOptions
from headwater.stream import DEFAULT_VNODE_COUNT

UPSTREAM: Final = "upstream"
STORAGE: Final = "storage."


def is_upstream(given: Mapping[str, str]) -> bool:
    """Whether the options are those of an upstream table."""
    return any(name.lower() == UPSTREAM for name in given)


def _since(name: str, text: str) -> str:
    """A version, or a time with its zone."""
    parse_since(name, text, "a version")
    return text


@dataclass(frozen=True, slots=True)
class UpstreamSourceOptions(TableOptions):
    """The options of an upstream table, read and checked. They travel to tasks.

    :ivar storage: options of an object store, given as ``storage.NAME``.
    """

    upstream: str = option(UPSTREAM, text_of, "delta:PATH: a Delta table. table:NAME: a versioned table.", "")
    key: tuple[str, ...] = option("key", names_of, "Delta: the columns that name a row, by commas.", ())
    table: str = option("table", text_of, "Delta: namespace.name of its rows downstream (default: lake.DIRECTORY).", "")
    vnodes: int = option(
        "vnodes", number(1), "Delta: into how many vnodes its rows are hashed; fixed for a query.", DEFAULT_VNODE_COUNT
    )
    store: str = option(
        "store",
        location_of,
        "Where the query keeps its state (default: a directory in the user's data directory). Of a versioned table: the"
        " store of its log.",
        "",
    )
    since: str | None = option(
        "since",
        _since,
        "No snapshot: what changed after a version (a number), or from a time with its zone on (2026-01-31T12:00:00Z).",
    )
    on_resnapshot: str = option(
        "onResnapshot", word(STOP, IGNORE), "stop when the table is read again, or ignore that.", STOP
    )
    storage: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """:raises InvalidOption: an unknown option, or a value that is not valid."""
        of_storage = {name: str(text) for name, text in given.items() if name.lower().startswith(STORAGE)}
        own = {name: text for name, text in given.items() if name not in of_storage}
        options = cls.read(own, " of an upstream table", f", and {STORAGE}…")
        storage = tuple((name[len(STORAGE) :].upper(), text) for name, text in of_storage.items())  # Spark lowers names
        return replace(options, store=options.store or default_state(options.upstream), storage=storage)

    def for_query(self) -> QueryOptions:
        """The query that reads the table; nothing is connected yet. :raises InvalidUpstream: it cannot be opened."""
        upstream = open_upstream(
            self.upstream,
            key=self.key,
            table=self.table,
            vnodes=self.vnodes,
            store=self.store if not self.upstream.startswith(f"{DELTA}:") else "",
            folder=self.tables,
            storage=dict(self.storage),
        )
        since = self.since
        if since is not None and since.isdecimal():
            since = str(upstream.epoch_of_version(int(since)))
        return QueryOptions.over(
            upstream,
            self.store,
            self.query or f"spark {upstream.name.rpartition('/')[2]}",
            since=since,
            rows_per_second=self.rows_per_second,
            max_rows=self.max_rows,
            max_epochs=self.max_epochs,
        )


def default_state(upstream: str) -> str:
    """The directory for the state of queries over one table."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", upstream.rpartition("/")[2])[:40].strip("-")
    name = f"{readable}-{hashlib.sha256(upstream.encode()).hexdigest()[:12]}"
    return str(data_directory() / "upstreams" / name)
