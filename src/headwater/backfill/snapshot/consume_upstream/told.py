"""What a query over an upstream table tells people: its status, and an entry in the journal when it stops."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from headwater.backfill.query import UpstreamQuery
from headwater.backfill.snapshot.consume_upstream.errors import RetentionMiss, UpstreamWaits
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamTableExecutor
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.errors import HeadwaterError
from headwater.journal.fs_store import FsStore
from headwater.journal.run_log import RunLog
from headwater.state.location import split_location

_log = logging.getLogger(__name__)


def status_of(
    query: UpstreamQuery, executor: UpstreamTableExecutor, plan: int, rows: int, waits: UpstreamWaits | None
) -> dict[str, Any]:
    """What a person wants to know; what has stopped says why, and the command that mends it.

    :param waits: why the table cannot be read now.
    """
    table, stopped = query.upstream, executor.stopped
    newest = table.newest_epoch() if stopped is None and waits is None else None
    consumed = executor.consumed_epoch
    return {
        "query": query.query,
        "upstream": table.name,
        "plan": plan,
        "phase": StreamPhase.STOPPED.value if stopped is not None else executor.phase.value,
        "snapshot_version": table.commit_version(executor.snapshot_epoch),
        "snapshot_done": executor.has_snapshot,
        "snapshot_rows": rows,
        "snapshot_vnodes": sum(row is not None and row.is_finished for _, row in executor.progress()),
        "vnodes": table.vnode_count,
        "consumed_version": table.commit_version(consumed) if consumed else None,
        "newest_version": None if newest is None else table.commit_version(newest),
        "paused": executor.is_paused,
        "limit": executor.rows_per_second,
        "problem": stopped.message if stopped is not None else None if waits is None else waits.message,
        "next_step": query.advice if stopped is not None else None if waits is None else waits.next_step,
        "updated_ms": time.time_ns() // 1_000_000,
    }


def tell_stopped(query: UpstreamQuery, stopped: RetentionMiss) -> None:
    """To the log, and to the journal beside the query's store; where that cannot be written, nobody stops."""
    _log.warning("Query %s stopped: %s %s", query.query, stopped.message, query.advice)
    engine, place = split_location(query.store)
    if engine != "embedded":
        return
    fields = {
        "event": "upstream_stopped",
        "query": query.query,
        "upstream": query.upstream.name,
        "error": type(stopped).__name__,
        "text": stopped.message,
        "next_step": query.advice,
    }
    journal = FsStore(Path(place) / "journal", durability="flush")
    try:
        RunLog.start(journal, query.query).record("notice", fields)
    except HeadwaterError as error:
        _log.warning("the journal of %s is not written: %s", query.query, error)
    finally:
        journal.close()
