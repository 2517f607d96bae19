"""A broker that is killed in the middle of a delivery, or whose answer is lost, has each change exactly once."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest
from tests.servers.kafka import KafkaServer
from tests.servers.proxy import TcpProxy
from tests.store.sinks.file_sinks import INSERT, ORDERS, Feed, order

from headwater import failpoints
from headwater.sinks.errors import SinkUnreachable
from headwater.sinks.kafka import KafkaSink


@pytest.mark.parametrize("step", ["sink.kafka.after_produce"])
@pytest.mark.soak
def test_the_broker_is_killed_between_produce_and_commit(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.sinks.kafka_channel.SECONDS", 10.0)
    with KafkaServer() as own:
        sink = KafkaSink(brokers=own.brokers, staging=str(tmp_path), replication=1)
        feed = Feed(sink)
        assert feed.changes(1, (INSERT, order(1)))
        restarts: list[threading.Thread] = []

        def hit(name: str) -> None:
            if name == step and not restarts:
                own.kill9()
                restarts.append(threading.Thread(target=own.start))
                restarts[0].start()

        monkeypatch.setattr(failpoints, "hit", hit)
        deadline = time.monotonic() + 90
        for epoch in (2, 3):
            while True:
                try:
                    feed.changes(epoch, (INSERT, order(epoch)))
                    break
                except SinkUnreachable:
                    assert time.monotonic() < deadline
        restarts[0].join()
        assert [json.loads(value or b"")["id"] for _, _, value in own.read(sink.topic_of(ORDERS))] == [1, 2, 3]
        assert sink.committed(ORDERS, "q", "b1").epoch == 3


class EndLosingProxy(TcpProxy):
    """Stands before a broker, and on command forwards the end of a transaction, loses its answer, and goes away.

    :ivar losing: do so with the next one; *is_sent* tells that it was forwarded.
    """

    losing = False
    is_sent = False
    _END_TRANSACTION = (26).to_bytes(2, "big")

    def to_server(self, piece: bytes) -> bytes:
        if self.losing and piece[4:6] == self._END_TRANSACTION:
            self.losing, self.is_sent = False, True
            self.refuse()
        return piece

    def to_client(self, piece: bytes) -> bytes:
        if self._refusing:
            self.cut()
        return piece


@pytest.mark.soak
@pytest.mark.parametrize("stays_away", [False, True])
def test_the_answer_to_a_commit_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays_away: bool) -> None:
    """The commit is repeated while there is time; after that the next producer ends it, and the token tells."""
    monkeypatch.setattr("headwater.sinks.kafka_channel.SECONDS", 3.0)
    with contextlib.ExitStack() as ends:
        proxies: list[EndLosingProxy] = []

        def advertise(port: int) -> int:
            proxies.append(ends.enter_context(EndLosingProxy("127.0.0.1", port)))
            return proxies[0].port

        own = ends.enter_context(KafkaServer(advertise))
        (proxy,) = proxies
        sink = KafkaSink(brokers=own.brokers, staging=str(tmp_path), replication=1)
        feed = Feed(sink)
        assert feed.changes(1, (INSERT, order(1)))
        token = feed.token(2)
        staged = [feed.stage_changes(token, [(INSERT, order(2))])]
        proxy.losing = True
        if stays_away:
            with pytest.raises(SinkUnreachable):
                sink.commit(ORDERS, token, staged)
            proxy.resume()
        else:
            threading.Timer(1.0, proxy.resume).start()
            assert sink.commit(ORDERS, token, staged)
        assert proxy.is_sent
        monkeypatch.setattr("headwater.sinks.kafka_channel.SECONDS", 60.0)
        assert not sink.commit(ORDERS, token, staged)
        assert feed.changes(3, (INSERT, order(3)))
        assert [json.loads(value or b"")["id"] for _, _, value in own.read(sink.topic_of(ORDERS))] == [1, 2, 3]
        assert sink.committed(ORDERS, "q", "b1").epoch == 3


@pytest.mark.soak
def test_a_broker_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes our bytes and says nothing, in the middle of a transaction: the batch is there once, and later."""
    monkeypatch.setattr("headwater.sinks.kafka_channel.SECONDS", 5.0)
    with contextlib.ExitStack() as ends:
        proxies: list[TcpProxy] = []

        def advertise(port: int) -> int:
            proxies.append(ends.enter_context(TcpProxy("127.0.0.1", port)))
            return proxies[0].port

        own = ends.enter_context(KafkaServer(advertise))
        sink = KafkaSink(brokers=own.brokers, staging=str(tmp_path), replication=1)
        feed = Feed(sink)
        assert feed.changes(1, (INSERT, order(1)))
        for _ in range(2):  # with the producer that is open, then with a new one
            proxies[0].swallow()
            with pytest.raises(SinkUnreachable, match=own.brokers):
                feed.changes(2, (INSERT, order(2)))
        proxies[0].resume()
        proxies[0].cut()
        assert feed.changes(2, (INSERT, order(2)))
        assert [json.loads(value or b"")["id"] for _, _, value in own.read(sink.topic_of(ORDERS))] == [1, 2]
