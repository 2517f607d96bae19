"""Errors of Citus clusters."""

from __future__ import annotations

from headwater.errors import ConflictError, HeadwaterError
from headwater.sources.errors import RefusedValue, SourceError

RESNAPSHOT = "Run: headwater resnapshot"


class NodeMissed(SourceError, ConflictError):
    """A node had shards before the capture could follow it, or was removed before it was read to its end.

    :ivar address: ``host:port`` of the node.
    """

    def __init__(self, address: str, reason: str, *, next_step: str = RESNAPSHOT) -> None:
        self.address = address
        super().__init__(f"Node {address} {reason}", next_step=next_step)


def name_node(error: HeadwaterError, address: str) -> None:
    """Say in *error* which node it is about."""
    if address not in error.message:
        error.message = f"Node {address}: {error.message}"
        error.args = (f"{error.message} {error.next_step}" if error.next_step else error.message,)


def name_table(error: RefusedValue, shard: str, table: str) -> None:
    """Say in *error*, of a value of *shard*, which table it is about: that is the one which people name."""
    error.table, error.message = table, error.message.replace(shard, table)
    error.next_step = (error.next_step or "").replace(shard, table) or None
    error.args = (f"{error.message} {error.next_step}" if error.next_step else error.message,)
