"""A synced log in aligned mode: no buffer, barriers in their place; what an unaligned run left behind comes first.

The way back from :mod:`headwater.log_store.synced`: persisted rows are emitted, then everything passes as it comes, and
the first checkpoint says that they are done. Nothing more is written.
"""

from __future__ import annotations

from headwater.log_store.errors import WrongCall
from headwater.log_store.synced import SyncedMessage
from headwater.log_store.synced_log import SyncedLog
from headwater.log_store.watermarks import Watermark
from headwater.stream import Barrier, BarrierKind, Chunk


class AlignedLogStore:
    """One instance; made by :class:`~headwater.log_store.synced_factory.SyncedLogStoreFactory`. For one thread."""

    def __init__(self, log: SyncedLog) -> None:
        self.log = log
        self._message: SyncedMessage | None = None
        self._stopped = False

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`push` may be called: not before everything was polled."""
        if self._stopped or self._message is not None:
            return False
        return not self.log.epoch or not (self.log.has_history() or self.log.recovered)

    def push(self, message: SyncedMessage) -> None:
        """Take the next message, when the last one was polled.

        :raises MessageOrderError: it may not come now. :raises WrongCall: poll first; or it cannot be followed.
        :raises ForeignSchema: rows or a watermark of other columns. :raises ForeignVnode: rows of other owners.
        """
        if not self._stopped and not self.wants_input:
            raise WrongCall("There is something to poll.", next_step="Push while wants_input is true.")
        self.log.follow(message)
        if not isinstance(message, Chunk) or message.num_rows:
            self._message = message

    def poll(self) -> SyncedMessage | None:
        """The first barrier, then persisted rows and their watermarks, then each message; ``None`` when it is polled.

        Seal the epoch that a durable barrier closes before the poll that gives the next one.

        :raises WrongCall: the checkpoint before this one was not sealed; nothing is lost.
        """
        message = self._message
        if isinstance(message, Barrier) and message.kind is BarrierKind.INITIAL:
            self._message = None
            return message
        if self.log.epoch and not self._stopped:
            found = self.log.take_history() or self.log.take_recovered()
            if found is not None:
                return found
        if isinstance(message, Barrier):
            if message.is_durable:
                self.log.check_sealed()
                self.log.commit(message, None, {})
            self._stopped = self.log.stops(message)
        self._message = None
        passes = not isinstance(message, Watermark) or self.log.passes(message)
        return message if passes else None
