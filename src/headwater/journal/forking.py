"""What a forked child must drop: inherited descriptors share their `flock` with the parent.

Objects that hold descriptors or locks register here; in a child of `os.fork` each is told to let go, before any other
code runs there. Without it a child that outlives a killed parent would keep the parent's locks.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Holder(Protocol):
    """Something that keeps descriptors or locks of this process."""

    def after_fork(self) -> None:
        """Close inherited descriptors and make fresh locks; other threads do not exist any more."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register(holder: Holder) -> None:
    """Tell *holder* after a fork, for as long as it lives."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        holder.after_fork()


os.register_at_fork(after_in_child=_in_child)
