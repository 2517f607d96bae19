"""What a sink is for its log: rows in, epochs ended, and what was not committed thrown away.

A writer lives from one start of the sink to its next: after an error, other settings or other vnodes a new one is made,
and the log hands out again what the old one did not commit. All calls come from one thread.

Later kinds of sinks stage in ``write`` and commit in ``barrier``, as these do; one that commits together with others
is another :class:`~headwater.sinks.delivery.Delivery` beside those of this package, over a writer of its own kind.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from headwater.stream import Chunk, Epoch


class SinkWriter(Protocol):
    """Writes, and commits at barriers."""

    def write(self, epoch: Epoch, chunk: Chunk) -> None:
        """Take the rows of *chunk*, which are of *epoch*."""

    def barrier(self, epoch: Epoch, is_checkpoint: bool) -> None:
        """*epoch* has ended; once for each epoch, in order.

        With *is_checkpoint* all rows up to here must be delivered when this returns: the log forgets them. Without,
        nothing need be: an epoch that is no checkpoint, or a checkpoint at which this sink does not commit.
        """

    def abort(self) -> None:
        """Throw away what is not committed and let go of everything; the last call, whatever came before."""


class AsyncSinkWriter(Protocol):
    """Delivers chunks at the same time, in any order."""

    def write(self, epoch: Epoch, chunk: Chunk) -> Future[Any]:
        """Begin to deliver *chunk*; the future is done when the log may forget it."""

    def barrier(self, epoch: Epoch, is_checkpoint: bool) -> None:
        """*epoch* has ended; the log forgets it once all futures of before are done."""

    def abort(self) -> None:
        """Cancel what is under way and let go of everything; the last call, whatever came before."""
