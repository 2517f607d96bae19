"""Makes the synced logs of one state store."""

from __future__ import annotations

import time
from collections.abc import Callable
from weakref import WeakSet

from headwater.log_store.aligned import AlignedLogStore
from headwater.log_store.consumers import SYNCED, ConsumerBook
from headwater.log_store.errors import WrongCall
from headwater.log_store.history import HISTORY_ROWS
from headwater.log_store.log import Log
from headwater.log_store.remote_consumers import RemoteConsumers
from headwater.log_store.sealer import Sealer
from headwater.log_store.state import LogStoreState
from headwater.log_store.synced import SyncedLogStore, SyncedOptions
from headwater.log_store.synced_log import SyncedLog
from headwater.log_store.watermarks import WatermarkBook
from headwater.stream import Epoch, VnodeBitmap


class SyncedLogStoreFactory:
    """Synced logs of one store; see :attr:`KvLogStoreFactory.synced`.

    :param state_of: makes the writing part of an instance of a log.
    """

    def __init__(
        self,
        sealer: Sealer,
        book: ConsumerBook,
        remote: RemoteConsumers,
        watermarks: WatermarkBook,
        state_of: Callable[[Log, VnodeBitmap | None], LogStoreState],
    ) -> None:
        self._sealer = sealer
        self._book = book
        self._remote = remote
        self._watermarks = watermarks
        self._state_of = state_of
        self._held: dict[str, Epoch] = {}
        self._stores: WeakSet[SyncedLogStore] = WeakSet()
        self._logs: WeakSet[SyncedLog] = WeakSet()

    def store(
        self,
        log: Log,
        vnodes: VnodeBitmap | None = None,
        *,
        owner: str | None = None,
        options: SyncedOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> SyncedLogStore:
        """An instance of *log* that owns *vnodes*.

        :param owner: the name under which mutations speak of it, by default that of the log.
        :raises WrongCall: the log has consumers: a synced log holds only what was not emitted.
        """
        chosen = options or SyncedOptions()
        made = SyncedLogStore(self._log(log, vnodes, owner, chosen.history_rows), chosen, clock)
        self._stores.add(made)
        return made

    def aligned(
        self,
        log: Log,
        vnodes: VnodeBitmap | None = None,
        *,
        owner: str | None = None,
        history_rows: int = HISTORY_ROWS,
    ) -> AlignedLogStore:
        """An instance of *log* in aligned mode; as :meth:`store` otherwise."""
        return AlignedLogStore(self._log(log, vnodes, owner, history_rows))

    def live_stores(self) -> list[SyncedLogStore]:
        """The instances that take in messages."""
        return [store for store in self._stores if store.wants_input]

    def has_live(self, log: str) -> bool:
        """Whether *log* has an instance, of either mode, that has not stopped."""
        return any(one.state.log.name == log and not one.is_stopped for one in self._logs)

    def _log(self, log: Log, vnodes: VnodeBitmap | None, owner: str | None, history_rows: int) -> SyncedLog:
        known = (*self._book.of(log.name), *self._remote.of(log.name))
        others = [consumer.name for consumer in known if consumer.name != SYNCED]
        if others:
            raise WrongCall(
                f"Log {log.name!r} has the consumer {others[0]!r}: a synced log holds only what was not emitted.",
                next_step="Choose another name for the synced log.",
            )
        consumer = self._book.register(log, SYNCED)
        made = SyncedLog(
            self._state_of(log, vnodes),
            self._sealer,
            self._book,
            consumer,
            self._watermarks,
            self._held,
            log.name if owner is None else owner,
            history_rows,
        )
        self._logs.add(made)
        return made
