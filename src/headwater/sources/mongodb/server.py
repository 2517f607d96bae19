"""What is asked of a server: what it is, where its log stands, and what there is in its databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bson import Timestamp

from headwater.sources.errors import ServerReplaced, SourceMisconfigured, SourceUnreachable
from headwater.sources.mongodb.connection import RESNAPSHOT, Client, Dsn, require_version

SHARDED: Final = "isdbgrid"
NO_REPLICA_SET: Final = (
    "Start mongod with --replSet rs0 and run rs.initiate() once: a server without a replica set has no log."
)


@dataclass(frozen=True, slots=True)
class Server:
    """Who answers.

    :ivar set_name: of the replica set; empty for a sharded cluster.
    :ivar is_sharded: it is a router of a sharded cluster: several changes may have one cluster time.
    """

    version: str
    set_name: str
    is_sharded: bool

    @classmethod
    def ask(cls, client: Client, dsn: Dsn) -> Server:
        """:raises SourceMisconfigured: it is too old, or has no log of changes.
        :raises SourceUnreachable: it has not found its place in the set yet: what it knows may be of before.
        """
        hello = client.admin.command("hello")
        version = require_version(dsn, client.admin.command("buildInfo"))
        is_sharded = hello.get("msg") == SHARDED
        if not is_sharded and "setName" not in hello:
            raise SourceMisconfigured(
                f"{dsn} is no member of a replica set: it has no log of changes.", next_step=NO_REPLICA_SET
            )
        if not is_sharded and not hello.get("isWritablePrimary") and not hello.get("secondary"):
            raise SourceUnreachable(f"{dsn} is starting, or recovers.", next_step="Try again.")
        return cls(version, str(hello.get("setName", "")), is_sharded)

    @property
    def commit_options(self) -> dict[str, Any]:
        """What a stream is asked for, so that it tells since when readers see a transaction over several shards.

        Empty where there is none, or the server cannot.
        """
        numbers = tuple(int(number) for number in self.version.partition("-")[0].split("."))
        if not self.is_sharded or numbers < (8, 2):
            return {}
        return {"showExpandedEvents": True} if numbers < (8, 2, 1) else {"showCommitTimestamp": True}

    def identity(self) -> dict[str, Any]:
        """Who it is, to be known again."""
        return {"kind": "sharded" if self.is_sharded else "replica set", "set": self.set_name}

    def require_same(self, identity: Mapping[str, Any], dsn: Dsn) -> None:
        """:raises ServerReplaced: it is not the one that has this identity."""
        mine = self.identity()
        if any(identity.get(name, value) != value for name, value in mine.items()):
            raise ServerReplaced(
                f"{dsn} is the {mine['kind']} {self.set_name!r}, and the capture followed"
                f" the {identity.get('kind')} {identity.get('set')!r}.",
                next_step=f"Give the address of the source that was captured. Where it was replaced: {RESNAPSHOT}",
            )


def cluster_time(client: Client) -> int:
    """The newest cluster time that the server knows: everything that committed is at it or before it.

    :raises SourceUnreachable: it knows none yet.
    """
    return max(_times(client))


def operation_time(client: Client) -> int:
    """The newest operation that the server has; of a sharded cluster, its newest cluster time.

    :raises SourceUnreachable: it knows none yet.
    """
    return _times(client)[0]


def _times(client: Client) -> list[int]:
    # a router that has just started knows a time that its shards have passed long ago, until it asks all of them
    answer = client.admin.command({"listDatabases": 1, "nameOnly": True} if client.is_mongos else {"ping": 1})
    told = (answer.get("operationTime"), answer.get("$clusterTime", {}).get("clusterTime"))
    found = [as_number(time) for time in told if isinstance(time, Timestamp)]
    if not found:
        raise SourceUnreachable("The server has just been started, and tells no time yet.", next_step="Try again.")
    return found


def as_number(time: Timestamp) -> int:
    """A cluster time as one number that is ordered as the times are."""
    return time.time << 32 | time.inc


def as_timestamp(time: int) -> Timestamp:
    """The inverse of :func:`as_number`."""
    return Timestamp(time >> 32, time & 0xFFFFFFFF)
