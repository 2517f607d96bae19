"""Rows from memory into Postgres, MySQL and Kafka, beside the fastest way to load the same rows there."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from _harness import Figure, best_in_turns, seconds_of
from _servers import Database, KafkaServer, MariaDbServer
from _sink_rows import TABLE, as_inserts, deliver_inserts
from _tools import mariadb, psql
from headwater.sinks.mysql import SESSIONS as MYSQL_SESSIONS
from headwater.sinks.open import open_sink
from headwater.sinks.postgres import SESSIONS as POSTGRES_SESSIONS

MYSQL_SETTINGS = {"innodb-buffer-pool-size": "1G", "innodb-log-file-size": "512M", "local-infile": "1"}
PRODUCER_SETTINGS = {
    "acks": "all",
    "compression.type": "lz4",
    "enable.idempotence": True,
    "linger.ms": 5,
    "queue.buffering.max.kbytes": 256 << 10,
    "queue.buffering.max.messages": 200_000,
}
_SLICE = 20_000


def into_postgres(rows: pa.Table, database: Database, folder: Path, turns: int) -> Figure:
    """A mirror of inserts, and COPY of the same rows into a table with a primary key."""
    inserts = list(as_inserts(rows))
    sink = open_sink("postgres", dsn=database.dsn)
    file = folder / "rows.copy"

    def mirror() -> float:
        database.execute("DROP TABLE IF EXISTS public.orders", "DROP SCHEMA IF EXISTS headwater CASCADE")
        POSTGRES_SESSIONS.close()
        return seconds_of(lambda: deliver_inserts(sink, inserts))

    def copy() -> float:
        database.execute("DROP TABLE IF EXISTS copied", "CREATE TABLE copied (LIKE public.orders INCLUDING ALL)")
        return seconds_of(psql(database, f"\\copy copied FROM '{file}'").run)

    mirror()
    _check(rows, database.value("SELECT count(*) FROM public.orders"))
    psql(database, f"\\copy public.orders TO '{file}'").run()
    seconds = best_in_turns(turns, mirror, copy)
    database.execute("DROP TABLE copied, public.orders")
    return _rate(
        "Postgres: mirror of inserts / COPY of the same rows into a table with a primary key",
        rows,
        seconds,
        0.35,
        turns,
    )


def into_mysql(rows: pa.Table, folder: Path, turns: int) -> Figure:
    """A mirror of inserts in MariaDB, and LOAD DATA of the same rows into a table with the same primary key."""
    inserts = list(as_inserts(rows))
    file = folder / "rows.tsv"
    with MariaDbServer(MYSQL_SETTINGS) as server:
        sink = open_sink("mysql", dsn=server.dsn, database="mirror")

        def mirror() -> float:
            MYSQL_SESSIONS.close()
            server.execute("DROP DATABASE IF EXISTS mirror", "DROP DATABASE IF EXISTS headwater")
            return seconds_of(lambda: deliver_inserts(sink, inserts))

        def load() -> float:
            server.execute("DROP TABLE IF EXISTS bench.loaded", "CREATE TABLE bench.loaded LIKE mirror.orders")
            statement = f"LOAD DATA LOCAL INFILE '{file}' INTO TABLE bench.loaded CHARACTER SET utf8mb4"
            return seconds_of(mariadb(server, statement, "--local-infile=1").run)

        server.execute("CREATE DATABASE bench")
        mirror()
        _check(rows, server.execute("SELECT count(*) FROM mirror.orders")[0][0])
        with file.open("wb") as output:
            options = ("--quick", "--batch", "--skip-column-names")
            mariadb(server, "SELECT * FROM mirror.orders", *options).run(stdout=output)
        seconds = best_in_turns(turns, mirror, load)
        _check(rows, server.execute("SELECT count(*) FROM bench.loaded")[0][0])
        MYSQL_SESSIONS.close()
    return _rate(
        "MySQL: mirror of inserts / LOAD DATA of the same rows into a table with a primary key",
        rows,
        seconds,
        None,
        turns,
    )


def into_kafka(rows: pa.Table, folder: Path, turns: int) -> Figure:
    """Inserts as messages of one partition in one transaction, and a bare producer that sends the same messages."""
    inserts = list(as_inserts(rows))
    numbers = count(1)
    with KafkaServer() as server:
        options: dict[str, Any] = {"brokers": server.brokers, "partitions": 1, "replication": 1}

        def changes() -> float:
            topic = f"sink{next(numbers)}.{{table}}"
            sink = open_sink("kafka", topic=topic, staging=str(folder / "staging"), **options)
            return seconds_of(lambda: deliver_inserts(sink, inserts))

        changes()
        messages = [{"key": key, "value": value} for _, key, value in server.read(f"sink1.{TABLE.name}")]
        _check(rows, len(messages))

        def produce() -> float:
            topic = f"bare{next(numbers)}"
            _create_topic(server.brokers, topic)
            return seconds_of(lambda: _produce(server.brokers, topic, messages))

        seconds = best_in_turns(turns, changes, produce)
    return _rate("Kafka: inserts as messages / librdkafka that sends the same messages", rows, seconds, None, turns)


def _create_topic(brokers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(60)


def _produce(brokers: str, topic: str, messages: list[dict[str, Any]]) -> None:
    producer = Producer({"bootstrap.servers": brokers, **PRODUCER_SETTINGS})
    for start in range(0, len(messages), _SLICE):
        some = messages[start : start + _SLICE]
        while len(producer) > _SLICE:  # so that the queue is never full
            producer.poll(0.01)
        if producer.produce_batch(topic, some) < len(some):
            raise RuntimeError("The queue of the producer is full.")
    if producer.flush(120):
        raise RuntimeError("The broker did not take all messages.")


def _check(rows: pa.Table, count: int) -> None:
    if count != rows.num_rows:
        raise RuntimeError(f"There are {count} rows, not {rows.num_rows}.")


def _rate(name: str, rows: pa.Table, seconds: list[float], goal: float | None, turns: int) -> Figure:
    ours, bound = seconds
    return Figure(name, rows.num_rows / ours, rows.num_rows / bound, goal, "higher", "rows/s", turns)
