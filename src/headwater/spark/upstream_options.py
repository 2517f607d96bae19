"""The options of the data source ``headwater`` for a stream of an upstream table."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from headwater.backfill.query import QueryOptions
from headwater.backfill.snapshot.consume_upstream.upstream_table import DELTA, UpstreamTable, open_upstream
from headwater.spark.directories import data_directory
from headwater.spark.errors import InvalidOption
from headwater.spark.option_table import flag, location_of, names_of, number, option, read_options, text_of, word
from headwater.spark.options import IGNORE, STOP
from headwater.stream import DEFAULT_VNODE_COUNT

UPSTREAM: Final = "upstream"
STORAGE: Final = "storage."


def is_upstream(given: Mapping[str, str]) -> bool:
    """Whether the options are those of an upstream table."""
    return any(name.lower() == UPSTREAM for name in given)


def _since(name: str, text: str) -> str:
    """A version, or a time; one without a zone is in UTC."""
    if text.isdecimal():
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidOption(
            f"Received {name}={text!r}.", next_step="Valid are a version, or a time as 2026-01-31T12:00:00Z."
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).isoformat()


@dataclass(frozen=True, slots=True)
class _Given:
    """The options as they were given; ``storage.NAME``, options of an object store, come beside them."""

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
    tables: str = option("tables", location_of, "Of a versioned table: the folder of the versioned tables.", "")
    query: str | None = option("query", text_of, "Name of the stream, under which it keeps what it has read.")
    columns: tuple[str, ...] | None = option(
        "columns", names_of, "Only these, by commas, in this order; * stands for all columns of the table."
    )
    since: str | None = option(
        "since", _since, "No snapshot: what changed after a version (a number), or from a time on (ISO 8601)."
    )
    rows_per_second: int | None = option("rowsPerSecond", number(0), "The most to read per second.")
    max_rows: int | None = option("maxRows", number(1), "About how many rows a batch has.")
    max_epochs: int | None = option("maxEpochs", number(1), "How many versions a batch has.")
    parallelism: int | None = option("parallelism", number(1), "Tasks side by side (default: processors).")
    preimages: bool = option("preimages", flag, "false: leave out the old rows of updates.", True)
    on_schema_change: str = option(
        "onSchemaChange", word(STOP, IGNORE), "stop when columns change, or ignore it and read the known ones.", STOP
    )
    on_resnapshot: str = option(
        "onResnapshot",
        word(STOP, IGNORE),
        "stop when the table is read again, or ignore that.",
        STOP,
    )
    takeover: bool = option("takeover", flag, "true: end another stream of the same name.", False)


@dataclass(frozen=True, slots=True)
class UpstreamSourceOptions:
    """The options, read and checked. They travel to tasks."""

    upstream: UpstreamTable
    query: QueryOptions
    parallelism: int
    columns: tuple[str, ...] | None = None
    preimages: bool = True
    on_schema_change: str = STOP
    on_resnapshot: str = STOP
    takeover: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> UpstreamSourceOptions:
        """:raises InvalidOption: an unknown option, or a value that is not valid.
        :raises InvalidUpstream: no such table can be opened.
        """
        of_storage = {name for name in given if name.lower().startswith(STORAGE)}
        own = {name: value for name, value in given.items() if name not in of_storage}
        options = _Given(**read_options(_Given, own, " of an upstream table", f", and {STORAGE}…"))
        store = options.store or default_state(options.upstream)
        upstream = open_upstream(
            options.upstream,
            key=options.key,
            table=options.table,
            vnodes=options.vnodes,
            store=store if not options.upstream.startswith(f"{DELTA}:") else "",
            folder=options.tables,
            storage={name[len(STORAGE) :].upper(): str(given[name]) for name in of_storage},  # Spark lowers names
        )
        since = options.since
        if since is not None and since.isdecimal():
            since = str(upstream.epoch_of_version(int(since)))
        query = QueryOptions.over(
            upstream,
            store,
            options.query or f"spark {upstream.name.rpartition('/')[2]}",
            since=since,
            rows_per_second=options.rows_per_second,
            max_rows=options.max_rows,
            max_epochs=options.max_epochs,
        )
        return cls(
            upstream,
            query,
            options.parallelism or os.cpu_count() or 2,
            options.columns,
            options.preimages,
            options.on_schema_change,
            options.on_resnapshot,
            options.takeover,
        )


def default_state(upstream: str) -> str:
    """The directory for the state of queries over one table."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", upstream.rpartition("/")[2])[:40].strip("-")
    name = f"{readable}-{hashlib.sha256(upstream.encode()).hexdigest()[:12]}"
    return str(data_directory() / "upstreams" / name)
