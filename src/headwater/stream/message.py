"""Message: what flows in a stream, and in which order it may.

A stream of one table is barriers with chunks between them. A chunk has no epoch of its own: it belongs to the epoch
that the barrier before it opened, so a chunk cannot span epochs. :class:`StreamState` follows a stream:

===========  ===============================  ==================================================  ===========
state        message                          condition                                           then
===========  ===============================  ==================================================  ===========
``WAITING``  barrier ``INITIAL``              none                                                ``RUNNING``
``RUNNING``  chunk                            none                                                ``RUNNING``
``RUNNING``  barrier of another kind          its ``prev`` is the last barrier's ``curr``         ``RUNNING``
``RUNNING``  the same with ``Stop`` for all   its ``prev`` is the last barrier's ``curr``         ``STOPPED``
===========  ===============================  ==================================================  ===========

Everything else is an error. A recovery begins a new stream, which is why ``INITIAL`` comes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from headwater.stream.barrier import Barrier, BarrierKind
from headwater.stream.chunk import Chunk
from headwater.stream.epoch import INVALID, Epoch, EpochPair
from headwater.stream.errors import MessageOrderError
from headwater.stream.mutation import Stop

Message = Chunk | Barrier


class StreamPhase(StrEnum):
    """Where a stream is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream has come to.

    :ivar phase: see the table of the module.
    :ivar last: the pair of the last barrier.
    """

    phase: StreamPhase = StreamPhase.WAITING
    last: EpochPair | None = None

    @property
    def epoch(self) -> Epoch:
        """The open epoch, to which the next chunk belongs; the invalid epoch before the first barrier."""
        return self.last.curr if self.last else INVALID

    def after(self, message: Message) -> StreamState:
        """The state after *message*.

        :raises MessageOrderError: the message may not come now.
        """
        if self.phase is StreamPhase.STOPPED:
            raise MessageOrderError("Received a message after the stop.", next_step="Begin a new stream.")
        if isinstance(message, Chunk):
            if self.phase is StreamPhase.WAITING:
                raise MessageOrderError(
                    "Received a chunk before the first barrier.",
                    next_step="Begin the stream with a barrier of kind 'initial'.",
                )
            return self
        if (message.kind is BarrierKind.INITIAL) is not (self.phase is StreamPhase.WAITING):
            raise MessageOrderError(
                f"Received a barrier of kind {message.kind.value!r} while the stream is {self.phase.value}.",
                next_step="A stream has one barrier of kind 'initial': its first message.",
            )
        if self.last is not None and not message.epoch.follows(self.last):
            raise MessageOrderError(
                f"Received a barrier that closes epoch {message.closes}; the open epoch is {self.epoch}.",
                next_step="A barrier is missing or came twice: recover from the last durable epoch.",
            )
        stops = isinstance(message.mutation, Stop) and not message.mutation.owners
        return StreamState(StreamPhase.STOPPED if stops else StreamPhase.RUNNING, message.epoch)


def with_epochs(messages: Iterable[Message], state: StreamState | None = None) -> Iterator[tuple[Epoch, Message]]:
    """Each message with the epoch that it belongs to: a chunk to the open one, a barrier to the one it closes.

    :raises MessageOrderError: at the first message that may not come where it does.
    """
    state = state or StreamState()
    for message in messages:
        state = state.after(message)
        yield (message.closes if isinstance(message, Barrier) else state.epoch), message
