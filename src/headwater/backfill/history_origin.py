"""Where the history of a table of a query comes from: the source, or a table that we keep."""

from __future__ import annotations

from headwater.backfill.kept_history import is_complete, release_pins
from headwater.backfill.plans import QueryState
from headwater.backfill.query import AUTO, SOURCE, TABLES, QueryOptions
from headwater.backfill.snapshot.record import SnapshotPhase


def origin_of(options: QueryOptions, state: QueryState, name: str) -> str:
    """It is chosen once, and written with the next save; a table that comes back is read from the source."""
    known = state.tables.get(name)
    record = state.table(name)
    if record.origin == TABLES and _is_unkept(options, state, name):
        record.unread = True
    if known is not None and (known.left or known.unread):
        if record.origin == TABLES and options.kept is not None:
            release_pins(options.store, options.kept, options.query, [name])
        record.origin = SOURCE
        state.snapshots.forget(state.batch, name)
    elif record.origin is None:
        wanted = options.origin
        if wanted == AUTO:
            is_new = known is None and state.delivered is None
            wanted = TABLES if is_new and is_complete(options, name) else SOURCE
        elif known is not None:
            wanted = SOURCE  # its history was begun by a release that had no choice
        record.origin = wanted
        state.put_table(name)
    return record.origin


def _is_unkept(options: QueryOptions, state: QueryState, name: str) -> bool:
    """Whether nobody keeps the table any more of whose snapshot something is left to be read."""
    if options.kept is not None:
        return False
    with state.store.snapshot() as view:
        found = state.snapshots.record(view, name)
    return found is None or found.phase in (SnapshotPhase.WAITING, SnapshotPhase.SNAPSHOT)
