"""BinlogStream: the event packets of a server's binlog from a position on.

The server is asked as a replica asks it: by the transactions that we have (``COM_BINLOG_DUMP_GTID`` of MySQL,
``@slave_connect_state`` of MariaDB), or by file and position where it does not number them. Before that it is looked at
whether it is the server, or one of its replicas, and still has what we need: a gap ends here, never in silence.

Nothing is acknowledged: a server removes its files by their age, whoever has read them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self
from uuid import UUID

import pymysql

from headwater.sources.errors import (
    LogPurged,
    ServerReplaced,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceUnreachable,
    SourceWentBack,
)
from headwater.sources.mysql.connection import Connection, Dsn, connect, server_errors, translated
from headwater.sources.mysql.gtid import Gtids, MariaDbGtids, MySqlGtids, contains
from headwater.sources.mysql.offset import MySqlOffset, base_of
from headwater.sources.mysql.server import Server, binlog_files, executed, purged

HEARTBEAT_SECONDS: Final = 1.0
COMMIT_SECONDS: Final = 2.0
"""How long a transaction may be in the log that we have read, and not among those that the server has executed."""
RESNAPSHOT: Final = "Run: headwater resnapshot"

_DUMP: Final = 0x12
_DUMP_GTID: Final = 0x1E
_FIRST_EVENT: Final = 4
_FATAL: Final = 1236
_READ_BYTES: Final = 1 << 20
_LARGEST_PACKET: Final = 0xFFFFFF


class BinlogStream:
    """The event packets of one server. :meth:`open` starts it."""

    def __init__(
        self, session: Connection, dsn: Dsn, server: Server, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._dsn = dsn
        self._clock = clock
        self._socket = session._sock
        self._bytes = bytearray()
        self._heard_at = clock()
        self.server = server
        self.bytes_received = 0

    @classmethod
    def open(cls, dsn: Dsn, start: MySqlOffset, identity: Mapping[str, Any]) -> Self:
        """Start at *start*.

        :param identity: what :meth:`Server.identity` gave, and ``replica``, the number that we call ourselves.
        :raises ServerReplaced: :raises SourceWentBack: :raises LogPurged: it cannot go on there.
        :raises SourceUnreachable: :raises AccessDenied: :raises SourceMisconfigured: the server cannot be used.
        """
        session = connect(dsn)
        try:
            with server_errors(dsn):
                server = Server.ask(session)
                check_server(session, dsn, server, start, identity)
                _introduce(session, server, start, int(identity["replica"]))
                _dump(session, server, start, int(identity["replica"]))
            return cls(session, dsn, server)
        except BaseException:
            session.close()
            raise

    def read(self, max_packets: int, max_bytes: int, timeout: float) -> list[bytes]:
        """Event packets that came, at most *timeout* seconds later; none where none came.

        :raises SourceUnreachable: the connection broke, or was silent for long. :raises LogPurged: the log has a gap.
        """
        packets: list[bytes] = []
        size = 0
        deadline = self._clock() + timeout
        received = False
        while True:
            while len(packets) < max_packets and size < max_bytes:
                packet = self._packet()
                if packet is None:
                    break
                packets.append(packet)
                size += len(packet)
            left = deadline - self._clock()
            if packets or (received and left <= 0):
                return packets
            self._receive(left)
            received = True

    def _packet(self) -> bytes | None:
        """The next whole event in what was received."""
        data, place, size = self._bytes, 0, _LARGEST_PACKET
        parts: list[tuple[int, int]] = []
        while size == _LARGEST_PACKET:  # an event of 16 MiB or more comes in several
            if len(data) < place + 4:
                return None
            size = int.from_bytes(data[place : place + 3], "little")
            parts.append((place + 4, place + 4 + size))
            place += 4 + size
        if len(data) < place:
            return None
        if len(parts) == 1:
            packet = bytes(memoryview(data)[4:place])
        else:
            packet = b"".join(data[start:end] for start, end in parts)
        del data[:place]
        if packet[:1] == b"\x00":
            return packet[1:]
        raise self._ended(packet)

    def _receive(self, timeout: float) -> None:
        try:
            self._socket.settimeout(max(timeout, 0.001))
            received = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            silence = self._clock() - self._heard_at
            if silence > self._dsn.timeout_seconds:
                raise SourceUnreachable(
                    f"{self._dsn} said nothing for {silence:.1f} s.",
                    next_step="Check that the server runs and answers.",
                ) from None
            return
        except OSError as error:
            raise self._broken(type(error).__name__) from None
        if not received:
            raise self._broken("it ended the connection")
        self._heard_at = self._clock()
        self.bytes_received += len(received)
        self._bytes += received

    def _broken(self, how: str) -> SourceUnreachable:
        return SourceUnreachable(
            f"The stream of {self._dsn} broke: {how}.", next_step="Check that the server runs and answers."
        )

    def _ended(self, packet: bytes) -> SourceError:
        if packet[:1] != b"\xff" or len(packet) < 9:
            return self._broken("it sent no more events")
        code = int.from_bytes(packet[1:3], "little")
        said = packet[9:].decode("utf-8", "replace") if packet[3:4] == b"#" else packet[3:].decode("utf-8", "replace")
        return dump_error(code, said, self._dsn)

    def close(self) -> None:
        """End the connection; the server notices."""
        if self._session._sock is not None:
            self._session._force_close()


def check_server(
    session: Connection, dsn: Dsn, server: Server, start: MySqlOffset, identity: Mapping[str, Any]
) -> None:
    """Whether the server can go on at *start*.

    :raises ServerReplaced: it is another server, without its history. :raises LogPurged: it has removed what we need.
    :raises SourceWentBack: it does not have all that we have. :raises SourceMisconfigured: it numbers no more.
    """
    if identity.get("family") != server.version.family:
        raise ServerReplaced(
            f"{dsn} is {server.version.family}, and {identity.get('family')} was captured.",
            next_step="Give the address of the server that was captured, or another --store.",
        )
    if start.gtids is None:
        _check_files(session, dsn, server, start)
        return
    same_number = identity.get("server_id") == server.settings.get("server_id")
    if same_number and None not in (identity.get("made"), server.made) and identity.get("made") != server.made:
        raise _replaced(dsn)
    now = executed(session, server)
    end = time.monotonic() + COMMIT_SECONDS
    while now is not None and not contains(now, start.gtids) and time.monotonic() < end:
        time.sleep(0.1)
        now = executed(session, server)
    if now is None:
        raise SourceMisconfigured(
            f"{dsn} no longer numbers its transactions: gtid_mode is {server.settings.get('gtid_mode')}.",
            next_step="SET GLOBAL gtid_mode = ON; (step by step: OFF_PERMISSIVE, ON_PERMISSIVE, ON); if it wrote "
            "meanwhile, then run: headwater resnapshot",
        )
    if not contains(now, start.gtids):
        if server.server != start.server and not _overlap(now, start.gtids):
            raise _replaced(dsn)
        raise SourceWentBack(
            f"{dsn} does not have all transactions that were captured: it was restored, its log was reset, or a "
            "replica took over that was behind.",
            next_step=RESNAPSHOT,
        )
    gone = purged(session, server)
    if gone is not None and not contains(start.gtids, gone):
        raise log_purged(dsn)


def _replaced(dsn: Dsn) -> ServerReplaced:
    return ServerReplaced(
        f"{dsn} is another server, with none of the transactions that were captured.",
        next_step="Give the address of the server that was captured; to begin anew with this one, run: headwater "
        "resnapshot",
    )


def _check_files(session: Connection, dsn: Dsn, server: Server, start: MySqlOffset) -> None:
    if server.server != start.server:
        raise ServerReplaced(
            f"{dsn} is another server, and files and positions of one server mean nothing on another.",
            next_step="Give the address of the server that was captured; to capture this one instead (with gtid_mode ="
            " ON another server can take over), run: headwater resnapshot",
        )
    files = binlog_files(session)
    if start.filename not in files:
        number = int(start.filename.rpartition(".")[2])
        numbers = [int(name.rpartition(".")[2]) for name in files if base_of(name) == base_of(start.filename)]
        if numbers and number > max(numbers):
            raise _went_back(dsn)
        raise log_purged(dsn)
    if start.position > files[start.filename]:
        raise _went_back(dsn)


def _went_back(dsn: Dsn) -> SourceWentBack:
    return SourceWentBack(
        f"The log of {dsn} ends before what was captured: it was reset, or the server was restored.",
        next_step=RESNAPSHOT,
    )


def _overlap(now: Gtids, ours: Gtids) -> bool:
    if isinstance(now, MySqlGtids) and isinstance(ours, MySqlGtids):
        return now.overlaps(ours)
    return isinstance(now, MariaDbGtids) and isinstance(ours, MariaDbGtids) and now.overlaps(ours)


def log_purged(dsn: Dsn) -> LogPurged:
    """The error of a gap."""
    return LogPurged(
        f"{dsn} has removed files of its log that were not captured yet: changes are lost.",
        next_step=f"To keep the log for longer: SET GLOBAL binlog_expire_logs_seconds = 604800; {RESNAPSHOT}",
    )


def dump_error(code: int, said: str, dsn: Dsn) -> SourceError:
    """The error of our tree for one with which the server ended the stream."""
    if code != _FATAL:
        return translated(pymysql.err.OperationalError(code, said), dsn)
    lower = said.lower()
    if "same server_uuid" in lower or "same server_id" in lower or "killed" in lower:
        return SourceBusy(
            f"{dsn} ended the stream: another process reads it under the number of this store.",
            next_step="Stop the other capture of this store.",
        )
    gaps = ("purged", "could not find first log", "not in the master's binlog", "is missing the gtid")
    if any(gap in lower for gap in gaps):
        return log_purged(dsn)
    if "more gtids" in lower or "diverged" in lower or "out-of-order" in lower or "impossible position" in lower:
        return _went_back(dsn)
    return SourceUnreachable(
        f"{dsn} ended the stream: {dsn.hide(' '.join(said.split()))}.",
        next_step=f"Run: headwater doctor {dsn}",
    )


def _introduce(session: Connection, server: Server, start: MySqlOffset, replica: int) -> None:
    """What a replica says before it asks for the log."""
    period = int(HEARTBEAT_SECONDS * 1e9)
    settings = ["@master_binlog_checksum = @@GLOBAL.binlog_checksum", f"@master_heartbeat_period = {period}"]
    if server.version.is_mariadb:
        settings.append("@mariadb_slave_capability = 4")
        if start.gtids is not None:
            settings += [f"@slave_connect_state = '{start.gtids}'", "@slave_gtid_strict_mode = 1"]
    else:
        own = UUID(int=replica)
        settings += ["@source_binlog_checksum = @@GLOBAL.binlog_checksum", f"@source_heartbeat_period = {period}"]
        settings += [f"@slave_uuid = '{own}'", f"@replica_uuid = '{own}'"]
    with session.cursor() as cursor:
        cursor.execute("SET " + ", ".join(settings))


def _dump(session: Connection, server: Server, start: MySqlOffset, replica: int) -> None:
    if isinstance(start.gtids, MySqlGtids):
        known = start.gtids.encoded()
        session._execute_command(_DUMP_GTID, struct.pack("<HIIQI", 0, replica, 0, _FIRST_EVENT, len(known)) + known)
        return
    place, name = _FIRST_EVENT, b""
    if start.gtids is None:
        # a place beyond 4 GiB cannot be asked for: what lies before it is read once more, and passed over
        place, name = start.position if start.position >> 32 == 0 else _FIRST_EVENT, start.filename.encode()
    session._execute_command(_DUMP, struct.pack("<IHI", place, 0, replica) + name)
