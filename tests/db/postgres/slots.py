"""What the tests of the streams share: a published table, its slot, and messages in a readable form."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator

from tests.servers.postgres import Database

from headwater.errors import TransientError
from headwater.sources.errors import SourceUnreachable
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.offset import Lsn
from headwater.sources.postgres.peek import PeekStream
from headwater.sources.postgres.stream import ReplicationStream

SLOT, PUBLICATION = "s", "Pub, of 'all'"
QUOTED = f'"{PUBLICATION}"'
PATIENCE = 60.0

AnyStream = ReplicationStream | PeekStream


def published(database: Database, *more: str) -> None:
    """A table ``t (id, v)``, published, and a slot; then *more*."""
    database.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        f"CREATE PUBLICATION {QUOTED} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
        *more,
    )


def opened(database: Database, start: int = 0, **options: object) -> ReplicationStream:
    return ReplicationStream.open(Dsn(database.socket_dsn), SLOT, [PUBLICATION], start, **options)  # type: ignore[arg-type]


def kind(message: bytes) -> str:
    return chr(message[25])


def kinds(messages: list[bytes]) -> str:
    return "".join(map(kind, messages))


def inserted(message: bytes, *, streamed: bool = False) -> int:
    """The id of an Insert into ``t``."""
    place = 30 if streamed else 26
    (length,) = struct.unpack_from("!I", message, place + 8)
    return int(message[place + 12 : place + 12 + length])


def end_of_commit(message: bytes) -> int:
    """The position after a Commit or Stream Commit."""
    place = {"C": 35, "c": 39}[kind(message)]
    return int(struct.unpack_from("!Q", message, place)[0])


def read_until(stream: AnyStream, enough: Callable[[list[bytes]], bool], max_messages: int = 10_000) -> list[bytes]:
    """Read until *enough* of all messages is true; fails when it does not become so."""
    messages: list[bytes] = []
    deadline = time.monotonic() + PATIENCE
    while not enough(messages):
        assert time.monotonic() < deadline, f"only {len(messages)} messages: {kinds(messages[-50:])}"
        messages += stream.read(max_messages, 1 << 20, 0.2)
    return messages


class Reopened:
    """One stream after another over the same slot, each from what was acknowledged, as a capture does it."""

    def __init__(self, open_stream: Callable[[int], AnyStream], start: int = 0) -> None:
        self._open_stream = open_stream
        self._acknowledged = start
        self.restarts = 0
        self.stream = open_stream(start)

    def __enter__(self) -> Reopened:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def acknowledge(self, lsn: int) -> None:
        self._acknowledged = max(lsn, self._acknowledged)
        self.stream.acknowledge(self._acknowledged)

    def read(self) -> list[bytes] | None:
        """The next messages; ``None`` after a restart: what was not acknowledged comes again."""
        try:
            return self.stream.read(50, 1 << 20, 0.2)
        except SourceUnreachable:
            self.stream.close()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.stream = self._open_stream(self._acknowledged)
                self.restarts += 1
                return None
            except TransientError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def collect(self, last: int, trouble: Callable[[int], None]) -> list[int]:
        """The ids up to *last*, durable at each commit; *trouble* is called with how many there are."""
        durable: list[int] = []
        half: list[int] = []
        deadline = time.monotonic() + 2 * PATIENCE
        while not durable or durable[-1] < last:
            assert time.monotonic() < deadline
            batch = self.read()
            if batch is None:
                half = []
                continue
            for message in batch:
                if kind(message) == "I":
                    half.append(inserted(message))
                elif kind(message) == "C":
                    durable, half = durable + half, []
                    self.acknowledge(end_of_commit(message))
            if not batch and not half and self.stream.server_wal_end:
                self.acknowledge(self.stream.server_wal_end)
            trouble(len(durable))
        return durable

    def read_to_the_end(self) -> None:
        """Until an error that does not pass."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.read()


def commits(count: int) -> Callable[[list[bytes]], bool]:
    return lambda messages: sum(kind(message) in "Cc" for message in messages) >= count


def confirmed(database: Database) -> int:
    found = database.value(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{SLOT}'")
    return Lsn.parse(found)


def eventually(state: Callable[[], bool], while_reading: AnyStream | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not state():
        assert time.monotonic() < deadline
        if while_reading is not None:
            assert while_reading.read(100, 1 << 20, 0.05) == []
        else:
            time.sleep(0.05)


def blocks_of(messages: list[bytes]) -> Iterator[tuple[str, int, list[bytes]]]:
    """``(kind, xid, messages)``: stream blocks as ``S``, stream ends as ``c`` and ``A``, plain messages as ``""``."""
    place = 0
    while place < len(messages):
        what = kind(messages[place])
        if what == "S":
            end = next(at for at in range(place, len(messages)) if kind(messages[at]) == "E")
            yield what, int.from_bytes(messages[place][26:30], "big"), messages[place + 1 : end]
            place = end + 1
        else:
            xid = int.from_bytes(messages[place][26:30], "big") if what in "cA" else 0
            yield (what if what in "cA" else ""), xid, [messages[place]]
            place += 1
