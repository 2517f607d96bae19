"""What a sink is given of the changes in its log, by its mode and its key. Pure, but for the reader at the end.

=====================  ================================================================================
mode                   rows
=====================  ================================================================================
``append-only``        as they are; a change that is no insert is an error
``force-append-only``  what adds, as inserts: deletes and old rows are left out
``upsert``             the net change of each key of the sink
``retract``            the same; the old rows of updates and deletes are needed
=====================  ================================================================================

A sink's key is *in order* with the stream if it contains the stream's key: all changes of one sink key are then of one
stream key, and come in order. Then each chunk is folded by itself, after it was read: a log keeps no borders of
chunks, so a chunk may hold what was written in several. If the key is not in order, one epoch's changes of a sink key
may come in any order (a row takes a key before another gives it up). Then the whole epoch is folded: by the stream's
key, deletes before inserts, by the sink's key. All rows of one sink key must then be in one instance of the log.

A whole epoch is held in memory as net changes. It spills nowhere, as the log still has it; what is held is folded
whenever it has doubled, so there are at most twice the net changes of the epoch, or :data:`FOLD_ROWS` rows. An epoch
whose net changes take more than *max_bytes* is an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from headwater.log_store.item import BarrierItem, ChunkItem, LogItem
from headwater.log_store.offset import LogOffset
from headwater.log_store.protocols import LogReader
from headwater.sinks.errors import EpochTooLarge, SinkInputError
from headwater.stream import Chunk, Epoch, compact, deletes_before_inserts, force_append_only
from headwater.stream.compaction import lone_updates

FOLD_ROWS = 65_536
MAX_EPOCH_BYTES = 512 << 20


class SinkMode(StrEnum):
    """Which changes a sink takes."""

    APPEND_ONLY = "append-only"
    FORCE_APPEND_ONLY = "force-append-only"
    UPSERT = "upsert"
    RETRACT = "retract"

    @property
    def has_key(self) -> bool:
        """Whether rows replace each other."""
        return self in (SinkMode.UPSERT, SinkMode.RETRACT)


class Folding(StrEnum):
    """What is folded into the net change of each key."""

    NONE = "none"
    """Nothing: every change of a row, as a table of our own takes them."""
    CHUNK = "chunk"
    """A chunk; an epoch where the sink's key is not in order with the stream."""
    EPOCH = "epoch"
    """An epoch, always: fewest rows for the sink."""


@dataclass(frozen=True, slots=True)
class SinkInput:
    """What a sink wants.

    :ivar stream_key: the key of the log's table.
    :ivar sink_key: the key by which the sink replaces rows.
    :ivar may_repeat: the log may tell a change twice, as one does that overlaps a snapshot: keep also what changes
        nothing, and a delete for what came and went.
    :raises SinkInputError: a mode that replaces rows, without a key.
    """

    mode: SinkMode
    stream_key: tuple[str, ...] = ()
    sink_key: tuple[str, ...] = ()
    folding: Folding = Folding.CHUNK
    may_repeat: bool = False

    def __post_init__(self) -> None:
        if self.mode.has_key and self.folding is not Folding.NONE and not (self.stream_key and self.sink_key):
            raise SinkInputError(
                f"Received mode={self.mode.value!r} without a key of the stream and of the sink.",
                next_step="Name both keys, or use mode 'append-only'.",
            )

    @property
    def is_in_order(self) -> bool:
        """Whether the changes of a key of the sink come in order."""
        return set(self.stream_key) <= set(self.sink_key)

    @property
    def folds_epochs(self) -> bool:
        """Whether rows come at the end of their epoch."""
        if not self.mode.has_key or self.folding is Folding.NONE:
            return False
        return self.folding is Folding.EPOCH or not self.is_in_order


class Preprocessor:
    """Turns the chunks of a log into those of a sink.

    :param max_bytes: what the net changes of an epoch may take, where an epoch is folded.
    """

    def __init__(self, wanted: SinkInput, *, max_bytes: int = MAX_EPOCH_BYTES, fold_rows: int = FOLD_ROWS) -> None:
        self._wanted = wanted
        self._max_bytes = max_bytes
        self._fold_rows = fold_rows
        self._held: list[Chunk] = []
        self._rows = self._folded_rows = 0

    def chunk(self, chunk: Chunk) -> Chunk | None:
        """What the sink is given of *chunk* now.

        :raises SinkInputError: a change that a sink of this mode cannot take.
        :raises EpochTooLarge: the epoch has more net changes than may be held.
        """
        wanted = self._wanted
        if not chunk.num_rows:
            return None
        if wanted.mode is SinkMode.APPEND_ONLY:
            return self._checked_inserts(chunk)
        if wanted.mode is SinkMode.FORCE_APPEND_ONLY:
            return _some(force_append_only(chunk))
        if wanted.folding is Folding.NONE:
            return chunk
        self._check_old_rows(chunk)
        if not wanted.folds_epochs:
            return _some(self._fold(chunk, wanted.sink_key))
        self._held.append(chunk)
        self._rows += chunk.num_rows
        if self._rows >= max(self._fold_rows, 2 * self._folded_rows):
            self._fold_held()
        return None

    def end_epoch(self) -> Chunk | None:
        """What the sink is given at the end of the epoch. :raises EpochTooLarge: as :meth:`chunk`."""
        if not self._held:
            return None
        self._fold_held()
        net = self._held[0]
        self.reset()
        if not self._wanted.is_in_order:
            net = deletes_before_inserts(net)
        return _some(self._fold(net, self._wanted.sink_key))

    def reset(self) -> None:
        """Forget the chunks of the epoch: they come again."""
        self._held.clear()
        self._rows = self._folded_rows = 0

    def _fold(self, chunks: Chunk | list[Chunk], key: tuple[str, ...]) -> Chunk:
        keep = self._wanted.may_repeat
        return compact(chunks, key, keep_unchanged=keep, keep_vanished=keep)

    def _fold_held(self) -> None:
        net = self._fold(self._held, self._wanted.stream_key)
        if net.nbytes > self._max_bytes:
            raise EpochTooLarge(
                f"The net changes of one epoch take {net.nbytes} bytes; this sink holds at most {self._max_bytes}.",
                nbytes=net.nbytes,
                limit=self._max_bytes,
                next_step="Let the sink's key contain the stream's key, end epochs more often, or allow more bytes.",
            )
        self._held = [net]
        self._rows = self._folded_rows = net.num_rows

    def _checked_inserts(self, chunk: Chunk) -> Chunk:
        if not chunk.is_inserts_only:
            raise SinkInputError(
                "An append-only sink was given a change that is no insert.",
                next_step="Use mode 'upsert' or 'retract', or 'force-append-only' to leave deletes and old rows out.",
            )
        return chunk

    def _check_old_rows(self, chunk: Chunk) -> None:
        wanted = self._wanted
        needs_old = wanted.mode is SinkMode.RETRACT or set(wanted.sink_key) != set(wanted.stream_key)
        if needs_old and lone_updates(chunk.ops.to_numpy()).any():
            raise SinkInputError(
                "The source told an update without the old row, which this sink needs.",
                next_step="Let the source log old rows (in Postgres: ALTER TABLE … REPLICA IDENTITY FULL), "
                "or use mode 'upsert' with the key of the table.",
            )


def _some(chunk: Chunk) -> Chunk | None:
    return chunk if chunk.num_rows else None


class PreprocessingReader:
    """Another reader's items, as a sink wants them; a chunk of which nothing is left does not come.

    The chunk of a folded epoch has the offset of the epoch's last chunk, so truncating it truncates them all. After an
    error the reader must be rewound.
    """

    def __init__(self, inner: LogReader, preprocessor: Preprocessor) -> None:
        self._inner = inner
        self._preprocessor = preprocessor
        self._last_id = 0
        self._barrier: BarrierItem | None = None

    def init(self, timeout: float | None = None) -> None:
        """As the inner reader's."""
        self._inner.init(timeout)
        self._forget()

    def start_from(self, after: Epoch | None = None) -> None:
        """As the inner reader's."""
        self._inner.start_from(after)

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        """The next item; ``None`` after *timeout* seconds, with nothing lost.

        :raises SinkInputError: a change that a sink of this mode cannot take.
        :raises EpochTooLarge: an epoch has more net changes than may be held.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        barrier, self._barrier = self._barrier, None
        if barrier is not None:
            return barrier
        while (item := self._inner.next_item(_left(deadline))) is not None:
            if isinstance(item, ChunkItem):
                self._last_id = item.chunk_id
                chunk = self._preprocessor.chunk(item.chunk)
            else:
                chunk = self._preprocessor.end_epoch()
                if chunk is None:
                    return item
                self._barrier = item
            if chunk is not None:
                return ChunkItem(item.epoch, self._last_id, chunk)
        return None

    def truncate(self, offset: LogOffset) -> None:
        """As the inner reader's."""
        self._inner.truncate(offset)

    def rewind(self) -> float:
        """As the inner reader's."""
        waited = self._inner.rewind()
        self._forget()
        return waited

    def close(self) -> None:
        """As the inner reader's."""
        self._forget()
        self._inner.close()

    def _forget(self) -> None:
        self._barrier = None
        self._preprocessor.reset()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
