"""Gate: lets the transactions of one node pass up to a place in its log, and holds the others back.

Transactions come in the order of their commits, and each is announced with the place of its commit: all messages before
the first one that commits at the gate or later pass. Blocks of transactions that are streamed before their commit pass,
too: they are told with their commit.
"""

from __future__ import annotations

from typing import Final

from headwater.sources.postgres.changes import RawStream
from headwater.sources.postgres.pgoutput import BEGIN, HEADER, STREAM_COMMIT

_COMMIT_LSN: Final = {BEGIN: HEADER + 1, STREAM_COMMIT: HEADER + 6}
"""Where a message of that type has the place of its commit: of a streamed one, after the xid and the flags."""


class Gate:
    """A stream of raw messages behind a gate, closed at first.

    :ivar limit: transactions that commit before it pass.
    """

    def __init__(self, stream: RawStream) -> None:
        self._stream = stream
        self._held: list[bytes] = []
        self.limit = 0

    @property
    def is_closed(self) -> bool:
        """Whether something waits for the gate to open."""
        return bool(self._held)

    @property
    def server_wal_end(self) -> int:
        """All that committed before it has passed."""
        return self.limit if self._held else self._stream.server_wal_end  # commits come in order; what is held is later

    @property
    def bytes_received(self) -> int:
        return self._stream.bytes_received

    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]:
        """As :meth:`RawStream.read`; nothing, at once, while the gate holds all that came."""
        messages = self._held or self._stream.read(max_messages, max_bytes, timeout)
        end = first_at(messages, self.limit)
        self._held = messages[end:]
        if self._held:
            self._stream.send_status()
        return messages[:end]

    def acknowledge(self, lsn: int) -> None:
        self._stream.acknowledge(lsn)

    def send_status(self) -> None:
        self._stream.send_status()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()


def first_at(messages: list[bytes], limit: int) -> int:
    """The place of the first message that announces a commit at *limit* or later; their number where none does."""
    for message in reversed(messages):
        if message[HEADER] in _COMMIT_LSN:
            if _commit_of(message) < limit:
                return len(messages)  # commits only go on: those before it are older still
            break
    else:
        return len(messages)
    for place, message in enumerate(messages):
        if message[HEADER] in _COMMIT_LSN and _commit_of(message) >= limit:
            return place
    return len(messages)


def _commit_of(message: bytes) -> int:
    place = _COMMIT_LSN[message[HEADER]]
    return int.from_bytes(message[place : place + 8], "big")
