"""WatchedConnection: a session that notices a server which says nothing, although the network takes our bytes.

Keep-alives of TCP do not help there: a proxy, a firewall or a stopped host can acknowledge bytes and never answer. And
a statement may take its time. So when nothing has come for half of the timeout, a second connection asks what the
server process of the session does. If it works, the session goes on waiting. If it does not, or no second connection
can be had, the session ends as one that broke.
"""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from typing import Any, Final

import psycopg
from psycopg.abc import RV, PQGen

_LEAST_SECONDS: Final = 2.0
"""How long the second connection waits at least for its answer: a busy server needs it."""

# A process that waits for its client has nothing to do: what we sent, or what it sent, is lost.
_STATE: Final = """
SELECT pg_catalog.pg_backend_pid(),
       (SELECT a.state = 'active' AND a.wait_event_type IS DISTINCT FROM 'Client'
        FROM pg_catalog.pg_stat_activity a WHERE a.pid = %s)
"""


class WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """:meth:`watch` begins the watch; until then it is like any connection."""

    _conninfo = ""
    _silence = 0.0
    _ask_at = 0.0

    def watch(self, conninfo: str, timeout: float) -> None:
        """:param conninfo: of the second connection; empty: it is not asked. :param timeout: to notice silence in."""
        self._conninfo, self._silence = conninfo, timeout / 2

    def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        """:raises psycopg.OperationalError: the server was silent; the connection is closed."""
        return super().wait(self._watched(gen) if self._silence else gen, *args, **options)

    def _watched(self, gen: PQGen[RV]) -> Generator[Any, Any, RV]:
        heard = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    heard = time.monotonic()
                else:
                    self.check_answers(time.monotonic() - heard)
                wanted = gen.send(ready)
        except StopIteration as end:
            result: RV = end.value
            return result

    def check_answers(self, seconds: float) -> None:
        """Nothing has come for *seconds* although an answer is due: ask now and then whether the server works on it.

        :raises psycopg.OperationalError: it does not; the connection is closed.
        """
        now = time.monotonic()
        if not self._silence or seconds < self._silence or now < self._ask_at:
            return
        if self._is_working() or self._has_input():
            self._ask_at = time.monotonic() + self._silence
            return
        self.close()
        raise psycopg.OperationalError(f"the server said nothing for {seconds:.1f} s")

    def _is_working(self) -> bool:
        if not self._conninfo:
            return False
        try:
            with WatchedConnection.connect(self._conninfo, autocommit=True, prepare_threshold=None) as other:
                other.watch("", 2 * max(_LEAST_SECONDS, self._silence))
                row = other.execute(_STATE, [self.info.backend_pid]).fetchone()
                assert row is not None
                is_pooled = row[0] != other.info.backend_pid  # a pooler has process numbers that say nothing
                return is_pooled or bool(row[1])
        except psycopg.Error:
            return False

    def _has_input(self) -> bool:
        waiting = select.poll()
        waiting.register(self.pgconn.socket, select.POLLIN)
        return bool(waiting.poll(0))
