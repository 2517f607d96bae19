"""What is kept of the query of one sink, while it does not run: forget it, or set it back.

Setting back never doubles anything: the sink has its tokens, and leaves out what it has. It mends a sink that was
restored from a backup, whose tokens are older than where its query stands.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from headwater import failpoints
from headwater.backfill.log_ranges import LogRanges
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import QueryState
from headwater.backfill.progress import Phase
from headwater.backfill.snapshot.backfill import release_pins
from headwater.log_store import KvLogStoreReader
from headwater.log_store.errors import EpochGone, InvalidOffset
from headwater.pipeline.config import PipelineConfig, SinkSection
from headwater.pipeline.errors import CannotRewind
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.delivery import behind_of, read_parked, unpark
from headwater.state import open_reader
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader, QueryStore, open_query_store

BEFORE_STEP = failpoints.register("pipeline.sink_before_step")
"""Before each durable step of what is done here."""


def forget_sink(config: PipelineConfig, section: SinkSection) -> list[str]:
    """Let the logs wait for the sink no longer, and forget all that is known of its query; its tables.

    What a process that died left of it goes when it is done again.
    """
    query = config.query(section)
    tables = _tables(config, query)
    failpoints.hit(BEFORE_STEP)
    with open_query_store(config.state, query, takeover=True) as store:
        if tables:  # else the logs do not have to exist
            with open_reader(config.store) as reader:
                KvLogStoreReader(reader, store).drop(tables, defer=True)
        failpoints.hit(BEFORE_STEP)
        store.clear()
    kept = config.kept_tables(section)
    if kept is not None:
        failpoints.hit(BEFORE_STEP)
        release_pins(config.store, kept, query, tables)
    return tables


def let_back(location: str, state: str, query: str, names: Collection[str] | None = None) -> list[str]:
    """Let the tables come back that *query*, which does not run, has parked: they are read once more; which they are.

    :param location: of the logs. :param state: of the query's state. :param names: only these.

    That they were away is sealed with it: the query may have ended before it knew.
    """
    parked = read_parked(state, query)
    names = sorted(parked if names is None else parked.keys() & names)
    if names:
        with open_query_store(state, query, takeover=True) as store:
            known = QueryState(store)
            for name in names:
                known.table(name).empties = 0  # its columns may have become what the sink's table cannot become
            _leave(location, known, names)
            unpark(store, names)
            failpoints.hit(BEFORE_STEP)
            known.save()
    return names


def _leave(location: str, state: QueryState, names: Sequence[str]) -> None:
    """With the next save the query does not have these tables any more; when they return they are read once more."""
    failpoints.hit(BEFORE_STEP)
    with open_reader(location) as reader:
        KvLogStoreReader(reader, state.store).drop(names, defer=True)
    for name in names:
        state.table(name).left = True
        state.put_table(name)


def rewind_sink(config: PipelineConfig, section: SinkSection, epoch: int | None) -> dict[str, Any]:
    """Deliver again what came after *epoch*; ``None``: what the sink does not have.

    What was committed before is forgotten last: while anything is left of where the query stood, a sink that lacks
    something is noticed at the next start, and this is done again.

    :raises CannotRewind: history is being read, the log no longer has it, or the sink was never delivered to.
    """
    query = config.query(section)
    if not _tables(config, query):
        raise CannotRewind(f"Nothing was delivered to sink {section.label!r} yet.", next_step="Run: headwater run")
    with open_query_store(config.state, query, takeover=True) as store:
        state = QueryState(store)
        parked = sorted(read_parked(config.state, query).keys() & state.tables.keys())
        tables = [name for name, record in state.tables.items() if not record.left and name not in parked]
        _check_history(state, section, tables)
        if epoch is None:
            epoch = _what_it_has(config, section, query, state.id, tables)
        before = None if state.delivered is None else state.delivered.epoch
        if parked:
            _leave(config.store, state, parked)
            failpoints.hit(BEFORE_STEP)
            state.save()
        _go_back(config, section, store, tables, epoch)
        failpoints.hit(BEFORE_STEP)
        place = QueryOffset(epoch, state.plan.number)
        state.put_delivered(place)
        state.put_planned(place, place)
        state.save()
        failpoints.hit(BEFORE_STEP)
        Coordinator(store).forget()
    return {"epoch": epoch, "was": before, "tables": tables}


def _go_back(
    config: PipelineConfig, section: SinkSection, store: QueryStore, tables: Sequence[str], epoch: int
) -> None:
    try:
        with open_reader(config.store) as source:
            reader = KvLogStoreReader(source, store)
            reader.init(tables)
            reader.rewind(epoch, [name for name in tables if reader.consumer(name).delivered() > epoch])
    except EpochGone:
        raise CannotRewind(
            f"The log no longer has what came after epoch {epoch}: it was delivered and forgotten.",
            next_step=f"Read what is missing once more: headwater resnapshot --sink {section.label}",
        ) from None
    except InvalidOffset:
        raise CannotRewind(
            f"Epoch {epoch} is not sealed yet.", next_step="Name an earlier one: headwater log status"
        ) from None


def _check_history(state: QueryState, section: SinkSection, tables: Sequence[str]) -> None:
    with state.store.snapshot() as view:
        status = QueryState.read_status(view) or {"tables": {}}
    reading = [name for name in tables if status["tables"].get(name, {}).get("phase") != Phase.DONE.value]
    if state.delivered is None or state.delivered.plan != state.plan.number:  # what is told may be a moment old
        reading += tables
    if reading:
        raise CannotRewind(
            f"The history of {reading[0]} is not delivered to sink {section.label!r} yet.",
            next_step="Wait until headwater status shows it as live.",
        )


def _what_it_has(config: PipelineConfig, section: SinkSection, query: str, backfill: str, tables: Sequence[str]) -> int:
    """The epoch up to which the sink has every change that was delivered to it.

    :raises CannotRewind: it has all of them.
    """
    sink = section.open()
    with open_reader(config.store) as reader, reader.snapshot() as view:
        ranges = LogRanges(view, tables)
        known = [ranges.changes(name, ranges.newest, ranges.newest).table for name in tables]
    behind = list(behind_of(config.state, query, backfill, sink, known))
    if not behind:
        raise CannotRewind(
            f"Sink {section.label!r} has everything that was delivered to it.",
            next_step="Name an epoch with --to-epoch to deliver from there all the same.",
        )
    return min(has.epoch for _, has in behind)


def _tables(config: PipelineConfig, query: str) -> list[str]:
    try:
        with QueryReader(config.state, query) as reader, reader.snapshot() as view:
            return QueryState.read_tables(view)
    except StoreNotFound:
        return []
