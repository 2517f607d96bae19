"""LogPlace: how far a stream has read a server's log, event by event. Pure.

A transaction begins with its number (GTID) and ends with its commit; what lies between is at one place of the commit
order, that of the boundary before it. Positions in a file are told modulo 2³², and a file can be larger than that.
"""

from __future__ import annotations

from headwater.sources.errors import SourceMisconfigured, SourceProtocolError, SourceUnreachable
from headwater.sources.mysql.binlog.events import EventHeader, Gtid, MariaDbGtid, Rotate
from headwater.sources.mysql.gtid import MariaDbGtids, MySqlGtids
from headwater.sources.mysql.offset import MySqlOffset

_WRAP = 1 << 32


class LogPlace:
    """Starts at *start*, the boundary from which a server was asked for its log.

    :param server: the server that sends it; it may be another one than that of *start*.
    :ivar place: of the transaction that is being read.
    :ivar commit_time_us: when it was committed.
    :ivar in_transaction: one is half way.
    """

    def __init__(self, start: MySqlOffset, server: str) -> None:
        self._server = server
        self._gtids = start.gtids
        self._filename = start.filename if server == start.server else ""
        self._position = start.position if server == start.server else 0
        self._begun_at = self._position
        self._pending: Gtid | MariaDbGtid | None = None
        self.place = start.place
        self.commit_time_us = 0
        self.in_transaction = False

    @property
    def boundary(self) -> MySqlOffset:
        """The place after the last transaction that ended."""
        return MySqlOffset(self._filename, self._position, self._gtids, self._server)

    @property
    def before(self) -> MySqlOffset:
        """The boundary before the transaction that is being read."""
        return MySqlOffset(self._filename, self._begun_at, self._gtids, self._server)

    def pass_event(self, header: EventHeader) -> None:
        """The event ends where its header says; those that the server made for us are in no file."""
        if header.is_artificial or not header.log_pos:
            return
        position = self._position - self._position % _WRAP + header.log_pos
        self._position = position + _WRAP if position < self._position else position

    def rotate(self, event: Rotate) -> None:
        """The log goes on in another file. :raises SourceUnreachable: a transaction was half way."""
        if self.in_transaction:
            raise SourceUnreachable(
                "The server's log ends within a transaction.", next_step="The capture reads it again."
            )
        self._filename, self._position = event.name, event.position

    def begin(self, event: Gtid | MariaDbGtid) -> None:
        """A transaction begins.

        :raises SourceMisconfigured: it has no number, and those before had. :raises SourceProtocolError: one has not
            ended.
        """
        if self.in_transaction:
            raise SourceProtocolError(
                "The log begins a transaction within another.", next_step="Start the capture again."
            )
        self.in_transaction = True
        self._pending = event
        self.commit_time_us = event.header.timestamp * 1_000_000
        if isinstance(event, Gtid):
            self.commit_time_us = event.commit_time or self.commit_time_us
            if event.is_anonymous and self._gtids is not None:
                raise SourceMisconfigured(
                    "The server wrote a transaction without a number: gtid_mode is not ON any more.",
                    next_step="Set gtid_mode = ON again; then run: headwater resnapshot",
                )
        self._begun_at = self._position - event.header.size
        self.place = self.before.place

    def end(self) -> None:
        """The transaction ended."""
        pending, self._pending, self.in_transaction = self._pending, None, False
        if isinstance(self._gtids, MySqlGtids) and isinstance(pending, Gtid):
            self._gtids = self._gtids.with_transaction(pending.uuid, pending.tag, pending.number)
        elif isinstance(self._gtids, MariaDbGtids) and isinstance(pending, MariaDbGtid):
            self._gtids = self._gtids.with_transaction(pending.domain, pending.server_id, pending.number)

    def heartbeat(self, name: str, position: int) -> None:
        """The server has nothing new, and its log ends here."""
        if not self.in_transaction and name == self._filename and position > self._position:
            self._position = position
