"""A broker that is killed in the middle of a delivery and started again has each change exactly once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tests.servers.kafka import KafkaServer
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
