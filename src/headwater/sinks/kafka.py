"""KafkaSink: each table of a query as a topic, one transaction per table and batch with the token in it.

``CHANGES``: every change is a message. ``MIRROR``: a compacted topic with the newest row of each key, and a tombstone
for a key that is gone. Consumers with ``isolation.level=read_committed`` see each batch as a whole and once; others see
messages of transactions that were aborted, too. How a stale process is kept out: :mod:`headwater.sinks.kafka_channel`.
"""

from __future__ import annotations

import string
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import pyarrow as pa

from headwater.databases.secret_files import current_options
from headwater.sinks.errors import SinkFenced, SinkInputError
from headwater.sinks.json_rows import slices
from headwater.sinks.kafka_channel import KafkaChannel, KafkaChannels, KafkaCluster, token_topics
from headwater.sinks.kafka_messages import (
    ChangeMessages,
    Format,
    Messages,
    key_messages,
    keys_of,
    merged,
    row_messages,
)
from headwater.sinks.row_batch import Append, Clear, Delete, RowBatch, Step, Update, Upsert
from headwater.sinks.row_sink import Overtaken, RowSink
from headwater.sinks.sink import Capabilities, Committed, Mode, Token
from headwater.sinks.token_record import TokenRecord
from headwater.sources.table import SourceTable
from headwater.sources.target_names import token_topic, topic_name

TOPIC: Final = "{namespace}.{table}"
TOMBSTONE_SLICE: Final = 20_000

_OURS = frozenset(
    {
        "bootstrap.servers",
        "enable.idempotence",
        "group.id",
        "isolation.level",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "transactional.id",
    }
)
_channels = KafkaChannels()
_known_topics: set[tuple[str, str]] = set()


@dataclass(frozen=True, kw_only=True)
class KafkaSink(RowSink):
    """Topics of the cluster at *brokers*. It can be pickled.

    :param brokers: ``host:port``, several with commas.
    :param topic: what the topic of a table is called; ``{namespace}`` and ``{table}`` are its names.
    :param format: of changes: ``json`` or ``debezium``.
    :param partitions: of topics that are made; the broker's default. :param replication: the same.
    :param tombstones: changes: each delete is followed by a message without a value, for compacted topics.
    :param settings: of librdkafka, security for example; they may hold passwords and are never shown. A value
        ``file:/path`` is read from that file whenever a client is opened; a new password opens new clients.
    :raises SinkInputError: a topic name without ``{table}``, or options that contradict each other.
    """

    capabilities: ClassVar[Capabilities] = Capabilities((Mode.CHANGES, Mode.MIRROR), readable=False, refuses_rows=True)

    brokers: str
    mode: Mode = Mode.CHANGES
    topic: str = TOPIC
    format: Format = "json"
    partitions: int | None = None
    replication: int | None = None
    tombstones: bool = False
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = {name for _, name, _, _ in string.Formatter().parse(self.topic) if name is not None}
        if "table" not in names or not names <= {"table", "namespace"}:
            raise SinkInputError(
                f"Received topic {self.topic!r}; it has {{table}} in it, and may have {{namespace}}.",
                next_step=f"Leave it out: it is {TOPIC!r} then.",
            )
        if self.mode is Mode.MIRROR and (self.format != "json" or self.tombstones):
            raise SinkInputError(
                "A mirror has rows as JSON, and tombstones of itself.",
                next_step="Leave out format and tombstones, or use mode 'changes'.",
            )
        ours = sorted(_OURS.intersection(self.settings))
        if ours:
            raise SinkInputError(f"The setting {ours[0]!r} is made by the sink.", next_step="Leave it out.")

    @property
    def name(self) -> str:
        return f"kafka:{self.brokers}"

    def check(self) -> None:
        """:raises SinkError: the library is missing, or no broker answers."""
        super().check()
        self._cluster.topics()

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the newest committed record of its token topic says."""
        tokens = self._tokens(table, query)
        return self._cluster.record(tokens).committed(backfill) if tokens in self._cluster.topics() else Committed()

    def ensure(self, table: SourceTable) -> None:
        """The topic is made in :meth:`begin`; one that is there stays as it is."""

    def begin(self, table: SourceTable, token: Token) -> Committed:
        """What the table has, once no other process can write to it any more.

        :raises SinkFenced: a later generation has written.
        """
        place = self._place(table, token.query)
        channel = _channels.take(place)
        if channel is None or channel.cluster != self._cluster:
            tokens = self._tokens(table, token.query)
            self._make_topics(table, token.query)
            # before others are fenced: a process that is late must not disturb those that are not
            self._refuse_late(token, self._cluster.record(tokens))
            channel = KafkaChannel(self._cluster, tokens)
        self._refuse_late(token, channel.record)
        _channels.give(place, channel)
        return channel.record.committed(token.backfill)

    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """Open the channel, which fences the producers before it, and write the generation into the token topic."""
        tokens = self._tokens(table, query)
        self._make_topics(table, query)
        if self._cluster.record(tokens).generation == generation:
            return
        channel = KafkaChannel(self._cluster, tokens)
        channel.write(
            table.full_name, tokens, iter(()), _key(table, query), replace(channel.record, generation=generation)
        )
        _channels.give(self._place(table, query), channel)

    def write(self, table: SourceTable, token: Token, batch: RowBatch) -> None:
        """One transaction. :raises Overtaken: another process has opened its channel since :meth:`begin`."""
        place = self._place(table, token.query)
        channel = _channels.take(place)
        if channel is None or channel.record.committed(token.backfill) != batch.has:
            raise Overtaken
        record = channel.record.following(token, batch.after)
        messages = self._messages(table, token, batch)
        channel.write(table.full_name, self.topic_of(table), messages, _key(table, token.query), record)
        _channels.give(place, channel)

    def keys(self, table: SourceTable) -> Iterator[pa.Table]:
        """The keys that the topic has a row of."""
        yield keys_of(table, self.own_schema(table), self._rows(table))

    def target(self, table: SourceTable) -> str:
        """The topic of *table*."""
        return self.topic_of(table)

    def topic_of(self, table: SourceTable) -> str:
        """The name of the topic of *table*."""
        return topic_name(self.topic, table.namespace, table.name)

    def _messages(self, table: SourceTable, token: Token, batch: RowBatch) -> Iterator[Messages]:
        if self.mode is Mode.CHANGES:
            now_us = time.time_ns() // 1000
            made = ChangeMessages(table, self.format, source=token.query, now_us=now_us, tombstones=self.tombstones)
            for step in batch.steps():
                assert isinstance(step, Append)
                yield from made.of(step)
            return
        both = bool(batch.batch.changes and batch.batch.history)
        written: dict[bytes, bytes | None] | None = {} if both else None
        for step in batch.steps():
            for messages in self._mirror_messages(table, step, written or {}):
                if written is not None:
                    written.update(zip(messages.keys, messages.values, strict=True))
                yield messages

    def _mirror_messages(
        self, table: SourceTable, step: Step, written: Mapping[bytes, bytes | None]
    ) -> Iterator[Messages]:
        """:param written: what this transaction has, which readers of committed messages do not see yet."""
        match step:
            case Clear():
                there = {**self._rows(table), **written}
                keys = [key for key, value in there.items() if value is not None]
                for start in range(0, len(keys), TOMBSTONE_SLICE):
                    some = keys[start : start + TOMBSTONE_SLICE]
                    yield Messages(some, [None] * len(some))
            case Delete(keys):
                yield from (key_messages(table, piece) for piece in slices(keys))
            case Upsert(rows) if rows.num_columns == len(table.columns):
                yield from (row_messages(table, piece) for piece in slices(rows))
            case Upsert(rows) | Update(rows):
                there = {**self._rows(table), **written}
                for piece in slices(rows):
                    yield _completed(row_messages(table, piece), there, only_existing=isinstance(step, Update))

    def _rows(self, table: SourceTable) -> dict[bytes, bytes]:
        """The rows of the mirror's topic, all of it read: a compacted topic has no other way to find them."""
        newest = dict(self._cluster.newest_values(self.topic_of(table)))
        return {key: value for key, value in newest.items() if value is not None}

    def _make_topics(self, table: SourceTable, query: str) -> None:
        topic, tokens = self.topic_of(table), self._tokens(table, query)
        replication = -1 if self.replication is None else self.replication
        if (self.brokers, tokens) not in _known_topics:
            compacted = {"cleanup.policy": "compact"} if self.mode is Mode.MIRROR else {}
            partitions = -1 if self.partitions is None else self.partitions
            self._cluster.create({topic: (partitions, replication, compacted), **token_topics(tokens, replication)})
            _known_topics.add((self.brokers, tokens))

    def _refuse_late(self, token: Token, record: TokenRecord) -> None:
        if record.generation > token.generation:
            raise SinkFenced(
                f"Query {token.query!r} was started again elsewhere: this is generation {token.generation} of it, "
                f"generation {record.generation} delivers.",
                next_step="Nothing: this process has nothing more to do.",
            )

    @property
    def _cluster(self) -> KafkaCluster:
        return KafkaCluster(self.brokers, current_options(self.settings))

    def _tokens(self, table: SourceTable, query: str) -> str:
        return token_topic(query, self.topic_of(table))

    def _place(self, table: SourceTable, query: str) -> tuple[Any, ...]:
        return (self.brokers, tuple(sorted(self.settings.items())), self._tokens(table, query))


def _completed(messages: Messages, there: Mapping[bytes, bytes | None], *, only_existing: bool) -> Messages:
    """Rows of which some columns are known, with the others from *there*."""
    pairs = zip(messages.keys, messages.values, strict=True)
    used = [(key, value) for key, value in pairs if value is not None and (there.get(key) or not only_existing)]
    keys = [key for key, _ in used]
    return Messages(keys, list(merged([value for _, value in used], [there.get(key) for key in keys])))


def _key(table: SourceTable, query: str) -> str:
    return f"{query}/{table.full_name}"
