"""Topics of a real Kafka broker: each change once, each batch as a whole, whoever wrote it."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from tests.servers.kafka import KafkaServer
from tests.store.sinks.file_sinks import (
    DELETE,
    INSERT,
    OLD,
    ORDERS,
    UPDATE,
    Feed,
    IntegerOrder,
    deliver_any_batches,
    order,
    table_of,
)

from headwater.sinks import json_rows, kafka_messages
from headwater.sinks import kafka as kafka_sink
from headwater.sinks.errors import (
    OtherAttempt,
    SinkBusy,
    SinkFenced,
    SinkInputError,
    SinkLoginRefused,
    SinkRowError,
    SinkUnreachable,
)
from headwater.sinks.kafka import KafkaSink
from headwater.sinks.kafka_channel import KafkaChannel, KafkaChannels, KafkaCluster
from headwater.sinks.open import open_sink
from headwater.sinks.row_sink import Overtaken
from headwater.sinks.sink import Committed, Token

_numbers = itertools.count(1)
Make = Callable[..., KafkaSink]


@pytest.fixture
def make(kafka: KafkaServer, tmp_path: Path) -> Make:
    """Sinks with topics of the test's own."""
    prefix = f"test{next(_numbers)}"

    def made(**options: Any) -> KafkaSink:
        options = {"topic": prefix + ".{namespace}.{table}", "staging": str(tmp_path), "replication": 1, **options}
        sink = open_sink("kafka", brokers=kafka.brokers, **options)
        assert isinstance(sink, KafkaSink)
        return sink

    return made


def values(kafka: KafkaServer, sink: KafkaSink, **how: Any) -> list[Any]:
    return [None if value is None else json.loads(value) for _, _, value in kafka.read(sink.topic_of(ORDERS), **how)]


def told(kafka: KafkaServer, sink: KafkaSink) -> list[tuple[str, int, str]]:
    return [(row["_change_type"], row["id"], row["status"]) for row in values(kafka, sink)]


def mirror(kafka: KafkaServer, sink: KafkaSink, table: Any = ORDERS) -> list[dict[str, Any]]:
    """The rows of a mirror's topic: what a reader has who goes by the keys."""
    newest: dict[bytes, bytes | None] = {}
    for _, key, value in kafka.read(sink.topic_of(table)):
        newest[key] = value
    rows = [json.loads(value) for value in newest.values() if value is not None]
    for row in rows:
        row["total"] = None if row.get("total") is None else Decimal(row["total"])
    return sorted(rows, key=lambda row: row["id"])


def forget() -> None:
    """As another process: no producer is open."""
    kafka_sink._channels = KafkaChannels()


def test_changes_as_json(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    sink.check()
    feed = Feed(sink)
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    assert feed.history(1, [order(7)], epoch=0)
    assert feed.changes(1, (INSERT, order(1)), (OLD, order(1)), (UPDATE, order(1, 'pa"id')), (DELETE, order(7)))
    assert told(kafka, sink) == [
        ("insert", 7, "new"),
        ("insert", 1, "new"),
        ("update_preimage", 1, "new"),
        ("update_postimage", 1, 'pa"id'),
        ("delete", 7, "new"),
    ]
    first = values(kafka, sink)[1]
    assert first == {
        "id": 1,
        "status": "new",
        "total": "1.00",
        "_change_type": "insert",
        "_commit_version": 100,
        "_commit_timestamp": "1970-01-01T00:00:01.000000Z",
        "_unavailable": None,
    }
    assert [key for _, key, _ in kafka.read(sink.topic_of(ORDERS))][:2] == [b'{"id":7}', b'{"id":1}']
    assert sink.committed(ORDERS, "q", "b1") == Committed(1, 1, 0)
    assert pickle.loads(pickle.dumps(sink)) == sink


def test_a_batch_that_comes_again_changes_nothing(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    feed = Feed(sink)
    assert feed.changes(5, (INSERT, order(1)))
    for _ in range(2):
        assert not feed.changes(5, (INSERT, order(1, "other")))
        assert not feed.changes(4, (INSERT, order(2)))
        forget()
    assert feed.changes(6, (INSERT, order(2)))
    assert told(kafka, sink) == [("insert", 1, "new"), ("insert", 2, "new")]


def test_only_epochs_that_are_not_there_are_sent(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = Token("q", "b1", 0, 2, 0)
    batches = [one for epoch in (1, 2) for one in [_log(epoch)]]
    assert sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter(batches), None)])
    assert told(kafka, sink) == [("insert", 1, "new"), ("insert", 2, "new")]


def _log(epoch: int) -> pa.RecordBatch:
    from tests.store.sinks.file_sinks import log_rows

    return log_rows(ORDERS, [(INSERT, order(epoch))], epoch)


def test_the_other_attempt_of_a_plan_is_refused(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    feed = Feed(sink)
    feed.history(1, [order(1)])
    token = feed.token(0, 1, attempt=1)
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, token, [feed.stage_history(token, [order(1, "other")])])
    assert len(values(kafka, sink)) == 1


def test_two_processes_take_turns_and_none_repeats_a_batch(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    one, other = KafkaChannels(), KafkaChannels()
    for epoch in range(1, 5):
        for channels in (one, other):
            kafka_sink._channels = channels
            Feed(sink).changes(epoch, (INSERT, order(epoch)))
    forget()
    assert [row["id"] for row in values(kafka, sink)] == [1, 2, 3, 4]


@pytest.mark.parametrize("pause", [0.0, 0.7])
def test_a_channel_that_is_fenced_says_so_whenever_it_notices(kafka: KafkaServer, make: Make, pause: float) -> None:
    sink = make()
    assert Feed(sink).changes(1, (INSERT, order(1)))
    cluster, tokens = KafkaCluster(kafka.brokers, {}), sink._tokens(ORDERS, "q")
    stale = KafkaChannel(cluster, tokens)
    KafkaChannel(cluster, tokens)

    def messages() -> Iterator[kafka_messages.Messages]:
        for number in range(3):
            yield kafka_messages.Messages([b"k"], [str(number).encode()])
            time.sleep(pause)

    with pytest.raises(Overtaken):
        stale.write("public.orders", sink.topic_of(ORDERS), messages(), "k", stale.record)
    forget()
    assert [row["id"] for row in values(kafka, sink)] == [1]


def test_an_earlier_generation_is_refused_and_disturbs_nobody(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    feed = Feed(sink)
    old, new = KafkaChannels(), KafkaChannels()

    def deliver(channels: KafkaChannels, epoch: int, generation: int) -> bool:
        kafka_sink._channels = channels
        token = replace(feed.token(epoch), generation=generation)
        return sink.commit(ORDERS, token, [feed.stage_changes(token, [(INSERT, order(epoch))])])

    assert deliver(old, 1, 1)
    assert deliver(new, 2, 2)
    with pytest.raises(SinkFenced, match="generation 2 delivers"):
        deliver(old, 3, 1)
    assert deliver(new, 3, 2)
    forget()
    assert [row["id"] for row in values(kafka, sink)] == [1, 2, 3]


def test_debezium_envelopes(kafka: KafkaServer, make: Make) -> None:
    sink = make(format="debezium", tombstones=True)
    feed = Feed(sink)
    feed.history(1, [order(7)])
    feed.changes(
        1,
        (INSERT, order(1)),
        (OLD, order(1)),
        (UPDATE, order(1, "paid")),
        (UPDATE, order(2, None, "2.00"), "status"),
        (DELETE, order(7)),
    )
    found = values(kafka, sink)
    assert found[-1] is None
    rows = found[:-1]
    assert [(row["op"], row["before"] and row["before"]["id"], row["after"]) for row in rows] == [
        ("r", None, {"id": 7, "status": "new", "total": "1.00"}),
        ("c", None, {"id": 1, "status": "new", "total": "1.00"}),
        ("u", 1, {"id": 1, "status": "paid", "total": "1.00"}),
        ("u", None, {"id": 2, "status": "__debezium_unavailable_value", "total": "2.00"}),
        ("d", 7, None),
    ]
    assert rows[2]["before"]["status"] == "new"
    source = rows[1]["source"]
    assert (source["schema"], source["table"], source["snapshot"], source["name"]) == ("public", "orders", "false", "q")
    assert (source["ts_ms"], source["ts_us"], source["commit_version"]) == (1000, 1_000_000, 100)
    assert rows[0]["source"]["snapshot"] == "true"
    assert rows[0]["ts_us"] // 1000 == rows[0]["ts_ms"] > 1_700_000_000_000
    feed.history(2, [order(1, "paid")], replaces=True)
    again = values(kafka, sink)[-1]
    assert (again["op"], again["source"]["snapshot"], again["after"]["id"]) == ("r", "incremental", 1)


def test_an_update_whose_halves_come_in_two_pieces_is_one_message() -> None:
    from tests.store.sinks.file_sinks import log_rows

    from headwater.sinks.change_rows import change_rows
    from headwater.sinks.row_batch import Append

    rows = change_rows(log_rows(ORDERS, [(INSERT, order(1)), (OLD, order(1)), (UPDATE, order(1, "x"))]), ORDERS.schema)
    made = kafka_messages.ChangeMessages(ORDERS, "debezium", source="q", now_us=1, tombstones=False)
    found = [
        json.loads(value or b"")
        for cut in (slice(0, 2), slice(2, 3))
        for some in made.of(Append(rows[cut]))
        for value in some.values
    ]
    assert [(row["op"], row["before"] and row["before"]["status"]) for row in found] == [("c", None), ("u", "new")]


def test_a_mirror_is_the_newest_row_of_each_key(kafka: KafkaServer, make: Make) -> None:
    sink = make(mode="mirror", partitions=3)
    feed = Feed(sink)
    feed.history(1, [order(key) for key in range(5)])
    feed.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(9)), (DELETE, order(9)))
    assert mirror(kafka, sink) == [order(0), order(1, "paid"), order(3), order(4)]
    assert kafka.partitions(sink.topic_of(ORDERS)) == 3
    feed.changes(2, (UPDATE, order(1, None, "5.00"), "status"), (UPDATE, order(8, None, "6.00"), "status"))
    expected = [order(0), order(1, "paid", "5.00"), order(3), order(4), {"id": 8, "total": Decimal("6.00")}]
    assert mirror(kafka, sink) == expected
    feed.changes(3, (INSERT, order(5)), (INSERT, order(6)), truncated=(3, 1))
    assert mirror(kafka, sink) == [order(6)]


def test_a_mirror_of_which_a_part_is_read_again(kafka: KafkaServer, make: Make) -> None:
    sink = make(mode="mirror")
    feed = Feed(sink)
    feed.history(1, [order(key) for key in range(10)])
    token = feed.token(1, 2)
    part = {"ranges": [(3, 6)], "replaces": True, "order": IntegerOrder()}
    changes = [(INSERT, order(20)), (INSERT, order(5, "gone by then"))]
    staged = [feed.stage_changes(token, changes), feed.stage_history(token, [order(4, "again")], **part)]
    assert sink.commit(ORDERS, token, staged)
    kept = [order(key) for key in (0, 1, 2, 6, 7, 8, 9, 20)]
    assert mirror(kafka, sink) == sorted([*kept, order(4, "again")], key=lambda row: row["id"])
    token = feed.token(2, 3)
    columns = {"columns": ("total",)}
    staged = [
        feed.stage_changes(token, [(UPDATE, order(0, "now"))]),
        feed.stage_history(token, [order(0, "x", "9.00"), order(77, "x", "9.00")], **columns),
    ]
    assert sink.commit(ORDERS, token, staged)
    assert mirror(kafka, sink)[0] == order(0, "now", "9.00")
    assert 77 not in {row["id"] for row in mirror(kafka, sink)}
    token = feed.token(3, 4)
    staged = [feed.stage_changes(token, [(INSERT, order(30))]), feed.stage_history(token, [order(1)], replaces=True)]
    assert sink.commit(ORDERS, token, staged)
    assert mirror(kafka, sink) == [order(1)]


def test_keys_of_every_type_are_read_back() -> None:
    kinds = {"d": pa.decimal128(10, 2), "b": pa.binary(), "t": pa.timestamp("us", tz="UTC"), "n": pa.timestamp("us")}
    kinds |= {"y": pa.date32(), "f": pa.float64(), "s": pa.string(), "o": pa.bool_()}
    table = table_of(kinds, key=tuple(kinds))
    rows = pa.table(
        [[Decimal("1.50")], [b"\x00\xff"], [1_000_001], [5], [3], [float("inf")], ['"'], [True]], schema=table.schema
    )
    keys = kafka_messages.key_messages(table, rows).keys
    assert kafka_messages.keys_of(table, table.schema, keys).to_pylist() == rows.to_pylist()


@pytest.mark.parametrize("seed", range(2))
def test_any_batches_give_what_a_dictionary_gives(seed: int, kafka: KafkaServer, make: Make) -> None:
    sink = make(mode="mirror", partitions=2)
    chance = random.Random(seed)
    expected = deliver_any_batches(Feed(sink), chance, epochs=8, unavailable=0.2, truncates=False, after_again=forget)
    assert mirror(kafka, sink) == expected


def test_changes_of_a_key_stay_in_order_in_one_partition(
    kafka: KafkaServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "SLICE_ROWS", 700)
    sink = make(partitions=4)
    feed = Feed(sink)
    changes = [(UPDATE, order(place % 100, str(place))) for place in range(5000)]
    feed.changes(1, *changes)
    found: dict[int, list[int]] = {}
    where: dict[int, set[int]] = {}
    for partition, _, value in kafka.read(sink.topic_of(ORDERS)):
        row = json.loads(value or b"")
        found.setdefault(row["id"], []).append(int(row["status"]))
        where.setdefault(row["id"], set()).add(partition)
    assert found == {key: list(range(key, 5000, 100)) for key in range(100)}
    assert {len(one) for one in where.values()} == {1}
    assert len(set().union(*where.values())) == 4


def test_a_row_that_is_too_large_is_refused_and_nothing_of_its_batch_is_seen(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    feed = Feed(sink)
    with pytest.raises(SinkRowError, match=r"message\.max\.bytes") as caught:
        feed.changes(1, (INSERT, order(1)), (INSERT, order(2, "secret " * 300_000)))
    assert "secret" not in str(caught.value)
    assert feed.changes(1, (INSERT, order(1)))
    assert told(kafka, sink) == [("insert", 1, "new")]


def test_a_message_that_no_broker_confirmed_is_not_committed_behind_a_producer_that_drops_one(
    kafka: KafkaServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real producer and broker; what stands in front of them drops the last message of the batch."""
    sink, feed = make(), Feed(make())
    assert feed.changes(1, (INSERT, order(1)))
    real = KafkaCluster.producer

    class Dropping:
        def __init__(self, producer: Any) -> None:
            self._producer = producer

        def __len__(self) -> int:
            return len(self._producer)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._producer, name)

        def produce_batch(self, topic: str, messages: list[dict[str, Any]], **more: Any) -> int:
            own = messages[:-1] if topic == sink.topic_of(ORDERS) else messages
            return int(self._producer.produce_batch(topic, own, **more)) + len(messages) - len(own)

    forget()
    with monkeypatch.context() as dropped:
        dropped.setattr(KafkaCluster, "producer", lambda cluster, name: Dropping(real(cluster, name)))
        with pytest.raises(SinkBusy, match="confirmed 2 of the 3 messages"):
            feed.changes(2, (INSERT, order(2)), (INSERT, order(3)))
    assert sink.committed(ORDERS, "q", "b1") == Committed(1)
    assert feed.changes(2, (INSERT, order(2)), (INSERT, order(3)))
    assert [row["id"] for row in values(kafka, sink)] == [1, 2, 3]


def test_an_open_transaction_of_another_topic_does_not_hide_the_token(kafka: KafkaServer, make: Make) -> None:
    sink = make()
    other = table_of({"id": pa.int64()}, name="other")
    Feed(sink, other).changes(1, (INSERT, {"id": 1}))
    hanging = Producer({"bootstrap.servers": kafka.brokers, "transactional.id": sink._tokens(other, "q")})
    hanging.init_transactions(30)
    hanging.begin_transaction()
    hanging.produce(sink._tokens(other, "q"), b"never committed")
    hanging.flush(30)
    feed = Feed(sink)
    assert feed.changes(1, (INSERT, order(1)))
    assert sink.committed(ORDERS, "q", "b1") == Committed(1)
    assert sink.committed(other, "q", "b1") == Committed(1)
    forget()
    assert Feed(sink, other).changes(2, (INSERT, {"id": 2}))
    assert sink.committed(other, "q", "b1") == Committed(2)


def test_names_that_no_topic_can_have_are_told_by_their_codes(make: Make) -> None:
    sink = make(topic="{table}")
    assert sink.topic_of(table_of({"id": pa.int64()}, name="Größe x")) == "Gr-xf6--xdf-e-x20-x"


def test_tables_with_odd_names_have_topics_of_their_own(make: Make, kafka: KafkaServer) -> None:
    sink = make()
    names = [("a.b", "c"), ("a", "b.c"), ("..", "orders"), ("x" * 128, "y" * 128), ("x" * 128, "y" * 127 + "z")]
    tables = [replace(ORDERS, namespace=namespace, name=name) for namespace, name in names]
    for number, table in enumerate(tables):
        assert Feed(sink, table).changes(1, (INSERT, order(number)))
    for number, table in enumerate(tables):
        assert [json.loads(value or b"")["id"] for _, _, value in kafka.read(sink.topic_of(table))] == [number]
        assert sink.committed(table, "q", "b1") == Committed(1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"topic": "all"}, "table"),
        ({"topic": "{table}{other}"}, "table"),
        ({"mode": "mirror", "format": "debezium"}, "mirror"),
        ({"settings": {"transactional.id": "x"}}, "made by the sink"),
        ({"mode": "history"}, "mode"),
        ({"format": "avro"}, "format"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(SinkInputError, match=match):
        open_sink("kafka", brokers="x:1", staging=str(tmp_path), **options)


def test_brokers_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.sinks.kafka_channel.SECONDS", 4.0)
    secret = {"sasl.password": "hidden", "sasl.username": "u", "sasl.mechanism": "PLAIN"}
    settings = {**secret, "security.protocol": "SASL_PLAINTEXT"}
    sink = open_sink("kafka", brokers="127.0.0.1:1", staging=str(tmp_path), settings=settings)
    with pytest.raises(SinkUnreachable, match=r"127\.0\.0\.1:1"):
        sink.check()
    assert "hidden" not in repr(sink)


def test_a_password_that_is_rotated_in_its_file(
    kafka: KafkaServer, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "cdc"}
    sink = replace(make(settings=settings | {"sasl.password": f"file:{file}"}), brokers=kafka.login_brokers)
    feed = Feed(sink)
    kafka.set_password("cdc", "first-password")
    file.write_text("first-password\n")
    assert feed.changes(1, (INSERT, order(1)))
    kafka.set_password("cdc", "second-password")
    file.write_text("wrong-password\n")
    with monkeypatch.context() as patch:
        patch.setattr("headwater.sinks.kafka_channel.SECONDS", 2.0)
        with pytest.raises(SinkLoginRefused, match=kafka.login_brokers) as caught:
            feed.changes(2, (INSERT, order(2)))
    assert "password" not in caught.value.message
    file.write_text("second-password\n")
    assert feed.changes(2, (INSERT, order(2)))
    assert feed.changes(3, (INSERT, order(3)))
    assert [value["id"] for value in values(kafka, sink)] == [1, 2, 3]
