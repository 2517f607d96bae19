"""What is asked of a server: what it is, where its log stands, and what there is in its databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bson import Timestamp

from headwater.sources.errors import ServerReplaced, SourceMisconfigured
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
        """:raises SourceMisconfigured: it is too old, or has no log of changes."""
        hello = client.admin.command("hello")
        version = require_version(dsn, client.admin.command("buildInfo"))
        is_sharded = hello.get("msg") == SHARDED
        if not is_sharded and "setName" not in hello:
            raise SourceMisconfigured(
                f"{dsn} is no member of a replica set: it has no log of changes.", next_step=NO_REPLICA_SET
            )
        return cls(version, str(hello.get("setName", "")), is_sharded)

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
    """The newest cluster time that the server knows: everything that committed is at it or before it."""
    answer = client.admin.command("ping")
    times = [answer.get("operationTime"), answer.get("$clusterTime", {}).get("clusterTime")]
    return max(as_number(time) for time in times if isinstance(time, Timestamp))


def operation_time(client: Client) -> int:
    """The newest operation that the server has; of a sharded cluster, its newest cluster time."""
    answer = client.admin.command("ping")
    time = answer.get("operationTime") or answer["$clusterTime"]["clusterTime"]
    return as_number(time)


def as_number(time: Timestamp) -> int:
    """A cluster time as one number that is ordered as the times are."""
    return time.time << 32 | time.inc


def as_timestamp(time: int) -> Timestamp:
    """The inverse of :func:`as_number`."""
    return Timestamp(time >> 32, time & 0xFFFFFFFF)
