"""The gate of a node: what commits before it passes, whole and in order; the rest waits."""

from __future__ import annotations

from headwater.sources.citus.members import Gate, first_at


def raw(kind: bytes, body: bytes = b"") -> bytes:
    return b"w" + bytes(24) + kind + body


def begin(lsn: int) -> bytes:
    return raw(b"B", lsn.to_bytes(8, "big") + bytes(12))


def streamed_commit(lsn: int) -> bytes:
    return raw(b"c", bytes(5) + lsn.to_bytes(8, "big") + bytes(16))


ROW, COMMIT = raw(b"I"), raw(b"C")


class Given:
    """A made-up stream: what it gives, one list for each read."""

    def __init__(self, *blocks: list[bytes]) -> None:
        self.blocks = list(blocks)
        self.server_wal_end = 1000
        self.bytes_received = 0
        self.told: list[int] = []

    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]:
        return self.blocks.pop(0) if self.blocks else []

    def acknowledge(self, lsn: int) -> None:
        self.told.append(lsn)

    def send_status(self) -> None: ...
    def fileno(self) -> int:
        return 0

    def close(self) -> None: ...


def test_all_before_the_first_commit_at_the_limit_passes() -> None:
    messages = [begin(10), ROW, COMMIT, begin(20), ROW, COMMIT, begin(30), ROW]
    assert [first_at(messages, limit) for limit in (10, 11, 20, 21, 30, 31)] == [0, 3, 3, 6, 6, 8]
    assert first_at([ROW, ROW, COMMIT], 0) == 3  # of a transaction whose beginning has passed
    assert first_at([raw(b"S"), ROW, raw(b"E"), streamed_commit(20)], 20) == 3


def test_over_a_made_up_stream_a_closed_gate_has_come_to_its_limit_whatever_the_server_told_last() -> None:
    stream = Given([begin(20), ROW, COMMIT, begin(40), ROW, COMMIT])
    stream.server_wal_end = 10  # a server that is busy tells no other place, and what is held is not read on
    gate = Gate(stream)
    gate.limit = 30
    assert gate.read(9, 9, 0) == [begin(20), ROW, COMMIT]
    assert gate.server_wal_end == 30


def test_over_a_made_up_stream_what_is_held_passes_when_the_gate_is_opened() -> None:
    later = [begin(30), ROW, COMMIT]
    stream = Given([begin(10), ROW, COMMIT, begin(20), ROW], [COMMIT], later)
    gate = Gate(stream)
    gate.limit = 15
    assert gate.read(9, 9, 0) == [begin(10), ROW, COMMIT]
    assert [gate.is_closed] == [True]
    assert gate.read(9, 9, 0) == []
    assert gate.server_wal_end == 15
    gate.limit = 25
    assert gate.read(9, 9, 0) == [begin(20), ROW]
    assert [gate.is_closed] == [False]
    assert gate.server_wal_end == 1000
    assert gate.read(9, 9, 0) == [COMMIT]
    assert gate.read(9, 9, 0) == []
    assert [gate.is_closed] == [True]
    gate.acknowledge(7)
    assert stream.told == [7]
