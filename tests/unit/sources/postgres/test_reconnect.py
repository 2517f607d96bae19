"""A stream that is opened again after an end that passes; the streams, the clock and the jitter are the test's."""

from __future__ import annotations

import contextlib

import pytest

from headwater.errors import TransientError
from headwater.sources.errors import AccessDenied, SlotLost, SourceClosed, SourceError, SourceUnreachable
from headwater.sources.postgres.reconnect import (
    RECONNECT_MAX_DELAY,
    FollowedStream,
    ReconnectDelay,
    StreamRestarted,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Scripted:
    """A stream that gives what its script says."""

    def __init__(self, start: int, script: list[list[bytes] | SourceError]) -> None:
        self.start, self.script = start, script
        self.acknowledged_lsn = start
        self.server_wal_end = start + 5
        self.bytes_received = 0
        self.last_message_time: float | None = 7.0
        self.statuses = 0
        self.closed = False

    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]:
        step = self.script.pop(0)
        if isinstance(step, SourceError):
            raise step
        self.bytes_received += sum(map(len, step))
        return step

    def acknowledge(self, lsn: int) -> None:
        self.acknowledged_lsn = lsn

    def send_status(self) -> None:
        self.statuses += 1

    def close(self) -> None:
        self.closed = True


class Server:
    """Opens scripted streams, or fails to."""

    def __init__(self, *scripts: list[list[bytes] | SourceError] | SourceError) -> None:
        self.scripts = list(scripts)
        self.opened: list[Scripted] = []

    def __call__(self, start: int) -> Scripted:
        script = self.scripts.pop(0)
        if isinstance(script, SourceError):
            raise script
        self.opened.append(Scripted(start, script))
        return self.opened[-1]


def followed(server: Server, clock: Clock, jitter: float = 0.5) -> FollowedStream:
    return FollowedStream(server, 10, delay=ReconnectDelay(lambda: jitter), clock=clock, sleep=clock.sleep)


def script() -> list[list[bytes] | SourceError]:
    return [[b"a"], GONE]


GONE = SourceUnreachable("The server is gone.")


def test_the_delays_double_up_to_their_maximum_and_start_again_after_progress() -> None:
    delay = ReconnectDelay(lambda: 1.0)
    assert [delay.next() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    for _ in range(2000):
        delay.next()
    assert delay.next() == RECONNECT_MAX_DELAY
    delay.reset()
    assert delay.next() == 1.0
    assert ReconnectDelay(lambda: 0.0).next() == 0.0
    assert all(0 <= ReconnectDelay().next() < 1 for _ in range(100))


def test_a_restart_is_told_once_and_begins_at_the_acknowledged_position() -> None:
    clock = Clock()
    server = Server([[b"aa"], [b"b"], GONE], [[b"b"]])
    stream = followed(server, clock)
    assert stream.read(9, 9, 1.0) == [b"aa"]
    stream.acknowledge(20)
    assert server.opened[0].acknowledged_lsn == 20
    assert stream.read(9, 9, 1.0) == [b"b"]
    assert stream.read(9, 9, 1.0) == []
    assert not stream.connected
    assert stream.last_error is GONE
    assert server.opened[0].closed
    assert stream.server_wal_end == 20
    with pytest.raises(StreamRestarted) as restarted:
        stream.read(9, 9, 1.0)
    assert (restarted.value.position, restarted.value.cause) == (20, GONE)
    assert isinstance(restarted.value, TransientError)
    assert server.opened[1].start == 20
    assert stream.read(9, 9, 1.0) == [b"b"]
    assert (stream.restarts, stream.bytes_received, stream.connected) == (1, 4, True)


def test_what_became_durable_while_there_was_no_connection_is_not_sent_again() -> None:
    clock = Clock()
    server = Server([GONE], [[b"x"]])
    stream = followed(server, clock)
    assert stream.read(9, 9, 1.0) == []
    stream.acknowledge(30)
    stream.acknowledge(25)
    with pytest.raises(StreamRestarted) as restarted:
        stream.read(9, 9, 1.0)
    assert restarted.value.position == server.opened[1].start == 30


def test_waiting_never_takes_longer_than_the_readers_timeout() -> None:
    clock = Clock()
    server = Server([GONE], GONE, GONE, GONE, GONE, GONE, [[b"x"]])
    stream = followed(server, clock, jitter=0.999)
    reads = 0
    while not stream.connected or not reads:
        reads += 1
        with contextlib.suppress(StreamRestarted):
            assert stream.read(9, 9, 0.25) == []
    assert max(clock.slept) == 0.25
    assert clock.now - 100 == pytest.approx(0.999 * (1 + 2 + 4 + 8 + 16 + 30))
    assert reads > 200


def test_only_progress_makes_the_delays_short_again() -> None:
    clock = Clock()
    server = Server(*(script() for _ in range(6)))
    stream = followed(server, clock, jitter=1.0)
    for expected in (1, 2, 4):
        assert stream.read(9, 9, 60) == [b"a"]
        assert stream.read(9, 9, 60) == []
        with pytest.raises(StreamRestarted):
            stream.read(9, 9, 60)
        assert clock.slept[-1] == expected
    stream.acknowledge(11)
    stream.read(9, 9, 60)
    stream.read(9, 9, 60)
    with pytest.raises(StreamRestarted):
        stream.read(9, 9, 60)
    assert clock.slept[-1] == 1
    clock.now += 31
    stream.read(9, 9, 60)
    stream.read(9, 9, 60)
    with pytest.raises(StreamRestarted):
        stream.read(9, 9, 60)
    assert clock.slept[-1] == 1, "a stream that lived long was none that fails at once"


@pytest.mark.parametrize("error", [AccessDenied("Refused."), SlotLost("Gone.")])
def test_what_needs_a_person_ends_it_at_once(error: SourceError) -> None:
    clock = Clock()
    stream = followed(Server([error]), clock)
    with pytest.raises(type(error)):
        stream.read(9, 9, 1.0)
    stream = followed(Server([GONE], error), clock)
    assert stream.read(9, 9, 1.0) == []
    with pytest.raises(type(error)):
        stream.read(9, 9, 1.0)
    with pytest.raises(type(error)):
        followed(Server(error), clock)


def test_status_goes_to_the_open_stream_and_a_closed_one_reads_no_more() -> None:
    clock = Clock()
    server = Server([GONE])
    with followed(server, clock) as stream:
        stream.send_status()
        assert server.opened[0].statuses == 1
        assert stream.last_message_time == 7.0
        stream.read(9, 9, 1.0)
        stream.send_status()
        assert server.opened[0].statuses == 1
        assert stream.last_message_time == 7.0
    with pytest.raises(SourceClosed):
        stream.read(9, 9, 1.0)
