"""Whether other sessions see a transaction that the log has already sent as committed.

A commit is in the log before it is visible. With synchronous replication the time between is as long as the standby
needs to confirm it: a reader of the log has the transaction, and a query of the same moment sees the rows of before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from headwater.sources.errors import SourceBusy
from headwater.sources.postgres.connection import Connection, ask

VISIBLE_SECONDS: Final = 5.0
"""How long a transaction is waited for; then the capture starts again from the last seal, and waits again."""
_PAUSE: Final = 0.02
_SNAPSHOT: Final = "SELECT pg_catalog.pg_current_snapshot()::text AS snapshot"
_XIDS: Final = 1 << 32


def await_visible(session: Connection, xids: Collection[int], keep_alive: Callable[[], None]) -> None:
    """Wait until every statement that *session* starts from now on sees the transactions *xids*. It holds no lock.

    :param xids: 32-bit transaction ids of the last two billion transactions.
    :param keep_alive: called while it waits.
    :raises SourceBusy: one is still invisible after :data:`VISIBLE_SECONDS`.
    """
    end = time.monotonic() + VISIBLE_SECONDS
    while invisible := _invisible(ask(session, _SNAPSHOT)[0].snapshot, xids):
        if time.monotonic() >= end:
            raise SourceBusy(
                f"Transaction {min(invisible)} is in the log and not visible to other sessions after"
                f" {VISIBLE_SECONDS:g} s: its commit waits for a synchronous standby.",
                next_step="No action needed if the standby returns: capture resumes by itself. Otherwise repair the"
                " standby, or take it out of synchronous_standby_names.",
            )
        keep_alive()
        time.sleep(_PAUSE)


def _invisible(snapshot: str, xids: Collection[int]) -> list[int]:
    """Those of *xids* that *snapshot* (``xmin:xmax:xip,…``, with 64-bit ids) does not see."""
    _, end, running = snapshot.split(":")
    xmax = int(end)
    in_progress = {int(xid) for xid in running.split(",") if xid}

    def is_seen(xid: int) -> bool:
        full = xmax + (xid - xmax + _XIDS // 2) % _XIDS - _XIDS // 2  # the one with these 32 bits that is next to xmax
        return full < xmax and full not in in_progress

    return [xid for xid in xids if not is_seen(xid)]
