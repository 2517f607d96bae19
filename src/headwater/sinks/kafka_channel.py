"""KafkaChannel: a transactional producer for one table of one query, and what the cluster has from it.

The transactional id is the name of its token topic, which has query and table in it: whoever opens a channel ends the
transaction of a process that opened one before, and that process can write nothing more (it is *fenced*). What the
table has is read after that, and then known for as long as the channel is not fenced: nobody else can have changed it.

It is the newest record of a compacted topic with one partition, which only these transactions write to. The topic is
one per query and table because readers of committed records stop at the first transaction that is open, also at that
of another table.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from headwater import failpoints
from headwater.sinks.errors import (
    SinkBusy,
    SinkDriverMissing,
    SinkInputError,
    SinkLoginRefused,
    SinkRowError,
    SinkUnreachable,
    SinkUnwritable,
)
from headwater.sinks.kafka_messages import Messages
from headwater.sinks.row_sink import Overtaken
from headwater.sinks.token_record import TokenRecord

SECONDS: Final = 60.0
OPEN_CHANNELS: Final = 16
PIECE_BYTES: Final = 32 << 20
ON_THEIR_WAY: Final = 20_000
TAIL: Final = 16
"""How many records back from the end of a token topic are looked at first; each commit takes two."""

BEFORE_TOPICS = failpoints.register("sink.kafka.before_topics")
AFTER_TOPICS = failpoints.register("sink.kafka.after_topics")
BEFORE_INIT = failpoints.register("sink.kafka.before_init")
AFTER_INIT = failpoints.register("sink.kafka.after_init")
AFTER_BEGIN = failpoints.register("sink.kafka.after_begin")
AFTER_PRODUCE = failpoints.register("sink.kafka.after_produce")
BEFORE_COMMIT = failpoints.register("sink.kafka.before_commit")
AFTER_COMMIT = failpoints.register("sink.kafka.after_commit")

_LOGIN_REFUSED: Final = "_AUTHENTICATION"
_WAIT: Final = 0.1
_LOG = logging.getLogger("headwater.sinks.kafka")
_PRODUCER: Final = (
    "acks",
    "batch.",
    "linger.",
    "compression.",
    "queue.buffering.",
    "message.",
    "transaction",
    "sticky.",
)
_PRODUCER_SETTINGS: Final = {
    "compression.type": "lz4",
    "linger.ms": "5",
    "partitioner": "murmur2_random",  # that of the Java clients: others who write find the same partitions
    "queue.buffering.max.kbytes": str(256 << 10),
    "queue.buffering.max.messages": "200000",
    "transaction.timeout.ms": "300000",
}
_NOT_YET: Final = (
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "UNKNOWN_TOPIC_OR_PART",
    "_UNKNOWN_PARTITION",
    "_UNKNOWN_TOPIC",
)
_OVER: Final = (
    "INVALID_PRODUCER_EPOCH",
    "INVALID_PRODUCER_ID_MAPPING",  # its id was not used for a week
    "PRODUCER_FENCED",
    "UNKNOWN_PRODUCER_ID",
    "_FATAL",  # what is asked of a producer that was fenced a moment ago
    "_FENCED",
    "_STATE",
)
"""The producer can be used no more; what is there tells the next one."""
_REFUSED: Final = (
    "_INVALID_ARG",
    "TOPIC_EXCEPTION",
    "INVALID_REPLICATION_FACTOR",
    "INVALID_PARTITIONS",
    "INVALID_CONFIG",
)
_TOKEN_TOPIC: Final = {"cleanup.policy": "compact", "segment.bytes": "1048576", "min.cleanable.dirty.ratio": "0.01"}


def kafka_library() -> Any:
    """:raises SinkDriverMissing: it is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise SinkDriverMissing(
            "A Kafka sink needs the package confluent-kafka.", next_step="Run: pip install 'headwater[kafka]'"
        ) from error
    return confluent_kafka


@dataclass(frozen=True)
class KafkaCluster:
    """Brokers and how to talk to them.

    :param settings: of librdkafka; they may hold passwords. :ivar errors: what its clients reported beside their calls.
    """

    brokers: str
    settings: Mapping[str, str] = field(repr=False)
    errors: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def named(self, topic: str) -> str:
        """What *topic* is called in messages."""
        return f"{self.brokers}, topic {topic},"

    def producer(self, transactional_id: str) -> Any:
        settings = {**_PRODUCER_SETTINGS, **self.settings, "transactional.id": transactional_id}
        return kafka_library().Producer(self._of(settings), logger=_LOG)

    @contextmanager
    def consumer(self) -> Iterator[Any]:
        """Of committed records; it is in no group."""
        own = {
            "group.id": "headwater",
            "isolation.level": "read_committed",
            "enable.auto.commit": "false",
            "enable.partition.eof": "true",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": "20",
        }
        made = kafka_library().Consumer(self._of({**self._shared, **own}), logger=_LOG)
        try:
            with self.logging_in(made):
                yield made
        finally:
            made.close()

    @property
    def admin(self) -> Any:
        return kafka_library().admin.AdminClient(self._of(self._shared), logger=_LOG)

    def topics(self) -> dict[str, int]:
        """The topics that there are, with their numbers of partitions. :raises SinkError: nobody answers."""
        admin = self.admin
        with report_errors(self.brokers), self.logging_in(admin):
            found = admin.list_topics(timeout=SECONDS / 4).topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def create(self, topics: Mapping[str, tuple[int, int, Mapping[str, str]]]) -> None:
        """Make those of *topics* that are not there: partitions, replication and settings of each; -1: the broker's."""
        made = kafka_library().admin.NewTopic
        there = self.topics()
        lacking = [made(name, *how[:2], config=dict(how[2])) for name, how in topics.items() if name not in there]
        if not lacking:
            return
        failpoints.hit(BEFORE_TOPICS)
        admin = self.admin  # what it promised ends with it
        for name, done in admin.create_topics(lacking, operation_timeout=SECONDS / 2).items():
            with report_errors(self.named(name)):
                try:
                    done.result(SECONDS)
                except kafka_library().KafkaException as error:
                    if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                        raise
        failpoints.hit(AFTER_TOPICS)

    def record(self, topic: str) -> TokenRecord:
        """The newest committed record of a token topic that is there; an empty one where it has none."""
        with report_errors(self.named(topic)), self.consumer() as consumer:
            first, end = self._ends(consumer, topic)
            for start in dict.fromkeys((max(first, end - TAIL), first)):
                newest = None
                for message in self._messages(consumer, topic, {0: start}, 1):
                    newest = message.value()
                if newest is not None:
                    return TokenRecord.of_text(newest)
        return TokenRecord()

    def _ends(self, consumer: Any, topic: str) -> tuple[int, int]:
        """The first offset of a token topic, and that after the last that is committed.

        A topic that was made a moment ago, or whose broker has just started, is not known at once.
        """
        kafka = kafka_library()
        deadline = time.monotonic() + SECONDS / 2
        while True:
            try:
                first, end = consumer.get_watermark_offsets(kafka.TopicPartition(topic, 0), timeout=SECONDS / 2)
            except kafka.KafkaException as error:
                if error.args[0].name() not in _NOT_YET or time.monotonic() > deadline:
                    raise
                time.sleep(_WAIT / 2)
            else:
                return first, end

    def newest_values(self, topic: str) -> Iterator[tuple[bytes, bytes | None]]:
        """Key and value of every committed message of *topic*, oldest first in each partition."""
        partitions = self.topics().get(topic, 0)
        with report_errors(self.named(topic)), self.consumer() as consumer:
            starts = {partition: kafka_library().OFFSET_BEGINNING for partition in range(partitions)}
            for message in self._messages(consumer, topic, starts, 10_000):
                yield message.key(), message.value()

    def _messages(self, consumer: Any, topic: str, starts: Mapping[int, int], at_once: int) -> Iterator[Any]:
        """What is committed in the partitions, from the given offsets up to their ends."""
        kafka = kafka_library()
        consumer.assign([kafka.TopicPartition(topic, partition, start) for partition, start in starts.items()])
        left = set(starts)
        deadline = time.monotonic() + SECONDS
        while left:
            for message in consumer.consume(at_once, timeout=_WAIT):
                deadline = time.monotonic() + SECONDS
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == kafka.KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise kafka.KafkaException(error)
            if time.monotonic() > deadline:
                raise SinkUnreachable(
                    f"Kafka at {self.named(topic)} sent nothing for {SECONDS:.0f} s.",
                    next_step="Start it, or try again.",
                )
        consumer.unassign()

    @property
    def _shared(self) -> dict[str, str]:
        """What is no setting of producers."""
        return {name: value for name, value in self.settings.items() if not name.startswith(_PRODUCER)}

    def _of(self, settings: Mapping[str, str]) -> dict[str, Any]:
        own = {"bootstrap.servers": self.brokers, "client.id": "headwater", "error_cb": self._note}
        return {**settings, **own}

    def _note(self, error: Any) -> None:
        self.errors.append(error.name())

    @contextmanager
    def logging_in(self, client: Any) -> Iterator[None]:
        """A call of *client*: where its login is refused, the library itself only says that time is over.

        :raises SinkLoginRefused: the brokers refused the login.
        """
        kafka = kafka_library()
        self.errors.clear()
        try:
            yield
        except kafka.KafkaException as error:
            client.poll(0)
            if _LOGIN_REFUSED not in self.errors:
                raise
            raise SinkLoginRefused(
                f"Kafka at {self.brokers} refused the login.",
                next_step="Write the right password to the settings of the sink, or to the file that they name.",
            ) from error


class KafkaChannel:
    """A producer that nobody has fenced, as far as it knows, and what the table has.

    :raises SinkError: the brokers do not answer or refuse.
    """

    def __init__(self, cluster: KafkaCluster, tokens: str) -> None:
        self.cluster = cluster
        self.tokens = tokens
        self._producer = cluster.producer(tokens)
        failpoints.hit(BEFORE_INIT)
        with report_errors(cluster.brokers), cluster.logging_in(self._producer):
            self._producer.init_transactions(SECONDS)
        failpoints.hit(AFTER_INIT)
        self.record = cluster.record(tokens)
        self._sent, self._reports = 0, _Reports()

    def write(self, table: str, topic: str, messages: Iterator[Messages], key: str, record: TokenRecord) -> None:
        """All *messages* and *record* in one transaction.

        :raises Overtaken: another process opened a channel since; nothing of it is there.
        :raises SinkError: whether it is there tells the next channel.
        """
        with report_errors(self.cluster.named(topic), table):
            self._sent, self._reports = 0, _Reports()
            self._producer.begin_transaction()
            failpoints.hit(AFTER_BEGIN)
            for some in messages:
                self._send(topic, some)
            self._send(self.tokens, Messages([key.encode()], [record.text.encode()]))
            self._wait(topic, 0)
            self._prove(topic)
            failpoints.hit(AFTER_PRODUCE)
            failpoints.hit(BEFORE_COMMIT)
            self._commit()
        failpoints.hit(AFTER_COMMIT)
        self.record = record

    def _send(self, topic: str, messages: Messages) -> None:
        """Hand them over once what was sent before is nearly gone: two slices are on their way, no more.

        That keeps the queue from being full: it would then refuse some and take later ones, out of order.
        """
        kafka = kafka_library()
        for some in messages.pieces(PIECE_BYTES):
            self._wait(topic, ON_THEIR_WAY)
            pairs = zip(some.keys, some.values, strict=True)
            made: list[dict[str, Any]] = [{"key": key, "value": value} for key, value in pairs]
            self._sent += len(made)
            if self._producer.produce_batch(topic, made, on_delivery=self._reports) < len(made):
                raise kafka.KafkaException(next(one["_error"] for one in made if "_error" in one))

    def _wait(self, topic: str, limit: int) -> None:
        """Until the brokers have all messages but *limit*."""
        deadline = time.monotonic() + SECONDS
        while len(self._producer) > limit:
            if self._producer.poll(_WAIT / 10):
                deadline = time.monotonic() + SECONDS
            if time.monotonic() > deadline:
                raise SinkUnreachable(
                    f"Kafka at {self.cluster.named(topic)} did not take what was sent in {SECONDS:.0f} s.",
                    next_step="Start it, or try again.",
                )

    def _prove(self, topic: str) -> None:
        """:raises SinkError: the brokers did not confirm every message of the transaction, each once."""
        if self._reports.error is not None:
            raise kafka_library().KafkaException(self._reports.error)
        delivered = self._reports.delivered
        if delivered != self._sent:
            raise SinkBusy(
                f"Topic {topic}: the brokers confirmed {delivered:,} of the {self._sent:,} messages of a batch.",
                next_step="No action needed: the transaction is aborted, and the batch is sent again.",
            )

    def _commit(self) -> None:
        for attempt in range(3):
            try:
                self._producer.commit_transaction(SECONDS)
            except kafka_library().KafkaException as error:
                if attempt == 2 or not error.args[0].retriable():
                    raise
            else:
                return


class _Reports:
    """The delivery reports of one transaction."""

    __slots__ = ("delivered", "error")

    def __init__(self) -> None:
        self.delivered = 0
        self.error: Any = None

    def __call__(self, error: Any, message: Any) -> None:
        if error is None:
            self.delivered += 1
        else:
            self.error = self.error or error


class KafkaChannels:
    """The channels of this process that are open and not in use: opening one takes a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Any, ...], KafkaChannel] = OrderedDict()

    def take(self, place: tuple[Any, ...]) -> KafkaChannel | None:
        """The channel of *place*, which is the caller's from now on."""
        with self._lock:
            return self._open.pop((os.getpid(), *place), None)

    def give(self, place: tuple[Any, ...], channel: KafkaChannel) -> None:
        """Keep a channel that works."""
        with self._lock:
            self._open[(os.getpid(), *place)] = channel
            while len(self._open) > OPEN_CHANNELS:
                self._open.popitem(last=False)


def token_topics(name: str, replication: int) -> dict[str, tuple[int, int, Mapping[str, str]]]:
    """How a token topic is made."""
    return {name: (1, replication, _TOKEN_TOPIC)}


@contextmanager
def report_errors(place: str, table: str | None = None) -> Iterator[None]:
    """Raise errors of the library as ours, without anything that was sent."""
    kafka = kafka_library()
    try:
        yield
    except kafka.KafkaException as error:
        raise _error_of(error.args[0], place, table) from error


def _error_of(error: Any, place: str, table: str | None) -> Exception:
    name = error.name()
    if name in _OVER:
        return Overtaken()
    if name == "MSG_SIZE_TOO_LARGE" and table is not None:
        return SinkRowError(table, "it is larger than a message may be (message.max.bytes)")
    if "AUTH" in name or name in ("_SSL", "POLICY_VIOLATION"):
        return SinkUnwritable(
            f"Kafka refuses {place}: {name}.", next_step="Look at the sink's settings, and at what its user may do."
        )
    if name in _REFUSED:
        return SinkInputError(f"Kafka cannot use the settings of {place}: {name}.", next_step="Look at the options.")
    if name in ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "REQUEST_TIMED_OUT"):
        return SinkUnreachable(f"Kafka at {place} does not answer: {name}.", next_step="Start it, or try again.")
    return SinkBusy(f"Kafka did not take the batch for {place}: {name}.", next_step="Try again.")
