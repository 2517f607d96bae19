"""SqlServerDouble: a server of TDS over :class:`.engine.Engine`, for tests. It is a double, not SQL Server."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from tests.servers.sqlserver_double import wire
from tests.servers.sqlserver_double.engine import Engine, Refused
from tests.servers.sqlserver_double.session import DoubleSession

PASSWORD = "se cret/1"
USERS = {"sa": {"state", "server state"}, "reader": {"state"}, "plain": set[str]()}
"""Users by what they may look at."""


class SqlServerDouble:
    """Listens on loopback until it is closed.

    :param scan_seconds: how often the capture job looks; ``None``: when :attr:`engine` is told to.
    """

    is_double = True

    def __init__(self, scan_seconds: float | None = 0.02) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headwater-tds-"))
        self.engine = Engine(self._folder)
        self.scan_seconds = scan_seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._injected: list[tuple[re.Pattern[str], int | str]] = []
        self.statements: list[str] | None = None
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._accept, self._scan)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def dsn(self) -> str:
        return self.dsn_of("sa")

    def dsn_of(self, user: str, options: str = "") -> str:
        return f"sqlserver://{user}:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/shop{options}"

    # -- what happens to servers -------------------------------------------------------------------------------------

    def drop_connections(self) -> None:
        """End all of them, in the middle of whatever they do."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def inject(self, pattern: str, what: int | str) -> None:
        """The next batch that has *pattern* gets the error of that number; ``"drop"``: the connection ends instead.

        A number below 0 is that of an error after all its rows.
        """
        self._injected.append((re.compile(pattern), what))

    @property
    def has_injected(self) -> bool:
        """All that was injected has happened."""
        return not self._injected

    def _injection(self, batch: str) -> int | str | None:
        for entry in self._injected:
            if entry[0].search(batch):
                self._injected.remove(entry)
                return entry[1]
        return None

    # -- serving -----------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        while not self._closed.wait(self.scan_seconds or 0.02):
            if self.scan_seconds is not None and self.engine.agent_runs:
                self.engine.scan()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        session: DoubleSession | None = None
        try:
            kind, _ = wire.receive(connection)
            assert kind == wire.PRELOGIN
            wire.send(connection, wire.prelogin_reply())
            kind, payload = wire.receive(connection)
            assert kind == wire.LOGIN
            login = wire.read_login(payload)
            if login.user not in USERS or login.password != PASSWORD:
                refused = wire.error(18456, f"Login failed for user '{login.user}'.", 14)
                wire.send(connection, refused + wire.done(failed=True))
                return
            if login.database != self.engine.name:
                wire.send(connection, wire.error(4060, "Cannot open database.", 11) + wire.done(failed=True))
                return
            wire.send(connection, wire.login_reply(login))
            session = DoubleSession(self.engine, USERS[login.user])
            packet = min(max(login.packet, 512), 32_767)
            while True:
                kind, payload = wire.receive(connection)
                if kind == wire.ATTENTION:
                    wire.send(connection, wire.done(cancelled=True), packet)
                elif kind == wire.BATCH:
                    wire.send(connection, self._answer(session, wire.read_batch(payload)), packet)
                else:
                    raise AssertionError(f"a message of kind {kind} is not spoken here")
        except wire.Hangup:
            pass
        finally:
            if session is not None:
                session.close()
            self._connections.discard(connection)
            connection.close()

    def _answer(self, session: DoubleSession, batch: str) -> bytes:
        if self.statements is not None:
            self.statements.append(batch)
        injected = self._injection(batch)
        if injected == "drop":
            raise wire.Hangup
        try:
            if isinstance(injected, int) and injected > 0:
                raise Refused(injected, "injected")
            made = b"".join(wire.result(names, rows) for names, rows in session.run(batch))
        except Refused as error:
            return wire.error(error.number, str(error)) + wire.done(failed=True)
        if isinstance(injected, int):
            return made.removesuffix(made[-13:]) + wire.error(-injected, "injected") + wire.done(failed=True)
        return made or wire.done()

    # -- writing -----------------------------------------------------------------------------------------------------

    def execute(self, *batches: str) -> list[Any]:
        """Run batches in a session of its own, each as the server gets it; the rows of the last one."""
        session = DoubleSession(self.engine, {"state"})
        try:
            rows: list[Any] = []
            for batch in batches:
                rows = [tuple(row) for _, found in session.run(batch) for row in found]
            return rows
        finally:
            session.close()

    def last_change(self) -> int:
        """The number of the last commit that changed a table that is captured."""
        with self.engine.lock:
            return self.engine.commits[-1].lsn if self.engine.commits else 0

    def wait_for_scan(self) -> None:
        """Until the capture job has read all that is committed by now."""
        last = self.last_change()
        end = time.monotonic() + 60
        while self.engine.scanned < last:
            assert time.monotonic() < end
            time.sleep(0.005)
