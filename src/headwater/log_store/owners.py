"""Which instance of a log owns which vnodes, in one process: two owners of a vnode would overwrite each other's rows.

Vnodes move at a barrier: one instance gives them up and another takes them over, in any order. So what counts is who
owns a vnode in one epoch; an instance speaks for the epoch that it writes next when it ends the one before. An instance
that is forgotten owns nothing.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from headwater.log_store.errors import ForeignVnode
from headwater.log_store.log import Log
from headwater.stream import Epoch, VnodeBitmap


class VnodeOwners:
    """The owners in all logs of a store. For the thread that writes."""

    def __init__(self) -> None:
        self._owned: dict[int, WeakKeyDictionary[object, tuple[Epoch, VnodeBitmap]]] = {}

    def check(self, owner: object, log: Log, vnodes: VnodeBitmap, epoch: Epoch | None = None) -> None:
        """Whether *owner* may own *vnodes* in *epoch*, or (``None``) from now on.

        :raises ForeignVnode: another instance owns one of them.
        """
        for other, (at, owned) in list(self._owned.get(log.number, {}).items()):
            if other is not owner and (epoch is None or at == epoch) and not owned.isdisjoint(vnodes):
                raise ForeignVnode(
                    f"Vnode {next(iter(owned & vnodes))} of log {log.name!r} has a writer in this process.",
                    next_step="Give its writer other vnodes at a barrier, or stop it, first.",
                )

    def claim(self, owner: object, log: Log, vnodes: VnodeBitmap, epoch: Epoch) -> None:
        """*owner* owns *vnodes* in *epoch* and those after it."""
        self._owned.setdefault(log.number, WeakKeyDictionary())[owner] = epoch, vnodes

    def release(self, owner: object, log: Log) -> None:
        """*owner* has stopped."""
        self._owned.get(log.number, WeakKeyDictionary()).pop(owner, None)
