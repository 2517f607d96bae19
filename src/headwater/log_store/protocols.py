"""What every kind of log store offers: a factory that makes readers and writers of logs in pairs.

Two kinds: the key-value log store (:mod:`~headwater.log_store.factory`), durable, which can be rewound; and the log
store in memory (:mod:`~headwater.log_store.in_mem`), a bounded channel for a sink that is as reliable as its writer.
What is built on logs takes these protocols, and asks the factory's constants, not its type.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import pyarrow as pa

from headwater.log_store.item import LogItem
from headwater.log_store.log import Log
from headwater.log_store.offset import LogOffset
from headwater.log_store.writer import FlushOptions
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap


class EndedEpoch(Protocol):
    """An ended epoch whose barrier is on its way."""

    def finish(self) -> None:
        """The barrier was passed on: take over new vnodes or a new schema, and go on."""


class LogWriter(Protocol):
    """The writing end of a log."""

    @property
    def epoch(self) -> Epoch:
        """The epoch that is being written."""

    def init(self, epochs: EpochPair, *, pause_read_on_bootstrap: bool = False) -> None:
        """Begin to write at ``epochs.curr``."""

    def write_chunk(self, chunk: Chunk) -> None:
        """Add rows to the current epoch."""

    def flush_current_epoch(self, next_epoch: Epoch, options: FlushOptions | None = None) -> EndedEpoch:
        """End the current epoch. After the barrier was passed on, call :meth:`EndedEpoch.finish`."""

    def pause(self) -> None:
        """No more chunks; barriers go on."""

    def resume(self) -> None:
        """Chunks again."""


class LogReader(Protocol):
    """The reading end of a log."""

    def init(self, timeout: float | None = None) -> None:
        """Wait until the writer begins; then :meth:`start_from`."""

    def start_from(self, after: Epoch | None = None) -> None:
        """Begin after epoch *after*, by default after what was truncated."""

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        """The next item; ``None`` after *timeout* seconds, with nothing lost."""

    def truncate(self, offset: LogOffset) -> None:
        """Everything up to *offset* was delivered."""

    def rewind(self) -> float:
        """After a failed delivery: wait, then :meth:`start_from` hands out again what was not truncated."""

    def close(self) -> None:
        """Let go of what the reader holds; closing twice is no error."""


class LogStoreFactory(Protocol):
    """Makes logs and their ends.

    :cvar ALLOW_REWIND: whether a reader can be rewound. Where not, a failed delivery ends the writer as well.
    :cvar REBUILD_SINK_ON_UPDATE_VNODE_BITMAP: whether a reader begins anew (``init``) when its vnodes change. Where
        not, the barrier tells them and reading goes on.
    """

    ALLOW_REWIND: ClassVar[bool]
    REBUILD_SINK_ON_UPDATE_VNODE_BITMAP: ClassVar[bool]

    def log(self, name: str, schema: pa.Schema, key_columns: tuple[str, ...]) -> Log:
        """The log *name*, made when it does not exist."""

    def pair(self, log: Log, consumer: str, vnodes: VnodeBitmap | None = None) -> tuple[LogReader, LogWriter]:
        """A reader and a writer of this process."""
