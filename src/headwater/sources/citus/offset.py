"""CitusOffset: a place in the logs of all nodes of a cluster, one for each.

Nodes commit by themselves, so there is no order between their commits. Two places are compared node by node: one lies
before the other only where it does on every node that both know; else neither lies before the other. A node that was
removed, and read to its end, lies behind for good (*retired*); one that joined later constrains nothing.

A change has two numbers: its place in the log of its node, and the *number* that its commit was given when the logs
were merged here. Numbers grow with the merged log and are near the time of the commit in microseconds, so that they
order the changes of one row also after its shard moved to another node. They say nothing about commits of two nodes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.citus.shard_numbers import numbers_of, ranges_of
from headwater.sources.errors import ForeignOffset, InvalidOffset
from headwater.sources.offset import CdcOffset, position_rows
from headwater.sources.postgres.mark import PostgresMark
from headwater.sources.postgres.offset import POSITION_DTYPE as OF_NODE
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.postgres.offset import positions_of as postgres_positions
from headwater.sources.postgres.slot import ServerIdentity
from headwater.sources.snapshots import SnapshotMark

POSITION_TYPE: Final = pa.binary(32)
"""``_position``: number of the commit (8 bytes), group of the node (4), number in the transaction (4), commit LSN (8),
xid (4), zero (4); big endian, so bytes sort as the merged log does."""
POSITION_DTYPE: Final = np.dtype(
    [("number", ">u8"), ("group", ">u4"), ("seq", ">u4"), ("commit_lsn", ">u8"), ("xid", ">u4"), ("zero", ">u4")]
)
_POSITION: Final = struct.Struct("!QIIQII")
_LAST: Final = 0xFFFF_FFFF
_NEXT_STEP: Final = "Give the text that to_json() wrote."


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where one node is.

    :ivar server: which server that is a place of, where it is followed from there.
    :ivar address: ``host:port``, as the cluster called it last.
    """

    at: PostgresOffset
    server: ServerIdentity | None = None
    address: str = ""

    def to_fields(self) -> dict[str, Any]:
        server = None if self.server is None else self.server.to_json()
        return self.at.to_fields() | {"server": server, "address": self.address}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> NodePlace:
        try:
            server = None if fields["server"] is None else ServerIdentity.from_json(fields["server"])
            return cls(PostgresOffset.from_fields(fields), server, str(fields["address"]))
        except (KeyError, TypeError, ValueError):
            raise InvalidOffset("A node of a Citus position lacks a field.", next_step=_NEXT_STEP) from None


@dataclass(frozen=True, slots=True, eq=False)
class CitusOffset(CdcOffset):
    """One place.

    :ivar nodes: by the group of the node.
    :ivar retired: groups of nodes that were removed, after all that they had committed was told.
    :ivar number: the greatest that a commit was given up to here.
    :ivar placements: which shards were where when the cluster was last known to be at rest: between that moment and
        this place no shard has moved, or what moved was merged by the time of its commits.
    :ivar left: of servers that left, by their system identifier: up to where they were told.
    :ivar shards: the numbers of the shards of distributed tables, by name, at that moment or when they were added.
    :ivar slots: addresses of servers that left, by their system identifier, where our slot may be there still.
    """

    kind: ClassVar[str] = "Citus"

    nodes: Mapping[int, NodePlace]
    retired: tuple[int, ...] = ()
    number: int = 0
    placements: str = ""
    left: Mapping[str, int] = field(default_factory=dict)
    shards: Mapping[str, frozenset[int]] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)

    def rank(self) -> tuple[int, ...]:
        """For equality alone."""
        ranks = [rank for group in sorted(self.nodes) for rank in (group, *self.nodes[group].at.rank())]
        return (*ranks, len(self.retired), *self.retired)

    def lies_within(self, other: CitusOffset) -> bool:
        """Whether all that lies before this place lies before *other*, too."""
        for group, place in self.nodes.items():
            if group in other.retired:
                continue
            found = other.nodes.get(group)
            if found is None or not _lies_within(place.at, found.at):
                return False
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CitusOffset):
            return NotImplemented
        return self.rank() == other.rank() and self.placements == other.placements

    def __hash__(self) -> int:
        return hash((self.kind, self.rank()))

    def __le__(self, other: object) -> bool:
        return self.lies_within(_same_kind(other))

    def __ge__(self, other: object) -> bool:
        return _same_kind(other).lies_within(self)

    def __lt__(self, other: object) -> bool:
        known = _same_kind(other)
        return self.lies_within(known) and not known.lies_within(self)

    def __gt__(self, other: object) -> bool:
        known = _same_kind(other)
        return known.lies_within(self) and not self.lies_within(known)

    def joined(self, other: CdcOffset) -> CitusOffset:
        """Of each node the later place; one that is retired in either is."""
        known = _same_kind(other)
        retired = tuple(dict.fromkeys((*self.retired, *known.retired)))
        nodes = {group: place for group, place in {**known.nodes, **self.nodes}.items() if group not in retired}
        for group in nodes.keys() & known.nodes.keys():
            if not _lies_within(known.nodes[group].at, nodes[group].at):
                nodes[group] = known.nodes[group]
        return replace(self, nodes=nodes, retired=retired, number=max(self.number, known.number))

    def is_behind(self, other: CdcOffset) -> bool:
        """On some node that both know; one that only *other* knows is not in use any more, or not yet."""
        known = _same_kind(other).nodes
        return any(
            group in known and not _lies_within(known[group].at, place.at) for group, place in self.nodes.items()
        )

    def with_node(
        self, group: int, at: PostgresOffset, number: int, server: ServerIdentity | None = None
    ) -> CitusOffset:
        """The same place, but for one node that went on; *server*: which one it is by now, where that is another."""
        place = replace(self.nodes[group], at=at, server=server or self.nodes[group].server)
        return replace(self, nodes={**self.nodes, group: place}, number=number)

    def position_after(self, last: bytes | None) -> bytes:
        number = self.number if last is None else int.from_bytes(last[:8], "big")
        return _POSITION.pack(number, _LAST, _LAST, 0, 0, 0)

    def to_fields(self) -> dict[str, Any]:
        return {
            "nodes": {str(group): place.to_fields() for group, place in self.nodes.items()},
            "retired": list(self.retired),
            "number": self.number,
            "placements": self.placements,
            "left": dict(self.left),
            "shards": {name: ranges_of(numbers) for name, numbers in self.shards.items()},
            "slots": dict(self.slots),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CitusOffset:
        try:
            nodes = {int(group): NodePlace.from_fields(place) for group, place in fields["nodes"].items()}
            retired = tuple(int(group) for group in fields["retired"])
            left = {str(server): int(lsn) for server, lsn in fields.get("left", {}).items()}
            shards = {str(name): numbers_of(text) for name, text in fields.get("shards", {}).items()}
            slots = {str(server): str(address) for server, address in fields.get("slots", {}).items()}
            return cls(nodes, retired, int(fields["number"]), str(fields["placements"]), left, shards, slots)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidOffset("A Citus position lacks a field.", next_step=_NEXT_STEP) from None


def _lies_within(one: PostgresOffset, other: PostgresOffset) -> bool:
    """Of places between transactions it is enough that the log was read so far: ranks tell commits apart."""
    return one.lsn <= other.lsn if one.is_boundary and other.is_boundary else one <= other


def _same_kind(other: object) -> CitusOffset:
    if not isinstance(other, CitusOffset):
        found = other.kind if isinstance(other, CdcOffset) else type(other).__name__
        raise ForeignOffset(
            f"A position of Citus was compared with one of {found}: they have no order.",
            next_step="Compare positions of one source only.",
        )
    return other


def positions_of(of_node: pa.FixedSizeBinaryArray, group: int, numbers: NDArray[np.uint64]) -> pa.FixedSizeBinaryArray:
    """The ``_position`` column of changes whose positions in the log of node *group* are *of_node*."""
    rows = position_rows(of_node, OF_NODE)
    made = np.zeros(len(rows), POSITION_DTYPE)
    made["number"], made["group"] = numbers, group
    for name in ("seq", "commit_lsn", "xid"):
        made[name] = rows[name]
    return pa.Array.from_buffers(POSITION_TYPE, len(made), [None, pa.py_buffer(made)])


@dataclass(frozen=True, slots=True)
class CitusMark(SnapshotMark):
    """What one snapshot of a cluster contains: of each node, what the snapshot of that node does.

    A change names its node by its ``_position``. Groups are numbered as nodes join: one that the mark does not know,
    and that was given before the snapshot, was removed before it, and the snapshot has all its changes; a later one
    joined after it.

    :ivar nodes: pairs of a group and its mark, ascending.
    :ivar inactive: groups that the cluster had and did not use: nothing of theirs is in the snapshot.
    :ivar taken_us: when it was taken, microseconds since 1970.
    :ivar last_group: the last that the cluster had given to a node by then, be it removed since.
    """

    kind: ClassVar[str] = "Citus"

    nodes: tuple[tuple[int, PostgresMark], ...]
    inactive: tuple[int, ...] = ()
    taken_us: int = 0
    last_group: int = 0

    @property
    def low(self) -> CitusOffset:
        return self._place({group: mark.low for group, mark in self.nodes})

    @property
    def high(self) -> CitusOffset:
        return self._place({group: mark.high for group, mark in self.nodes})

    def _place(self, places: Mapping[int, PostgresOffset]) -> CitusOffset:
        return CitusOffset({group: NodePlace(place) for group, place in places.items()}, (), self.taken_us)

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        rows = position_rows(positions, POSITION_DTYPE)
        groups = rows["group"].astype(np.int64)
        newest = max((group for group, _ in self.nodes), default=-1)
        contained: NDArray[np.bool_] = (groups <= max(newest, self.last_group)) & ~np.isin(groups, self.inactive)
        for group, mark in self.nodes:
            chosen = np.flatnonzero(groups == group)
            if not chosen.size:
                continue
            of_node = postgres_positions(*(rows[name][chosen] for name in ("commit_lsn", "seq", "xid")))
            contained[chosen] = mark.contains(of_node)
        return contained

    def unseen(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """Those changes, all committed before the snapshot was taken, that it does not show yet.

        Those of a node that is not in use come from the log alone: no snapshot will show them, and none is waited for.
        """
        unused = np.isin(position_rows(positions, POSITION_DTYPE)["group"].astype(np.int64), self.inactive)
        unseen: NDArray[np.bool_] = ~self.contains(positions) & ~unused
        return unseen

    def to_fields(self) -> dict[str, Any]:
        nodes = {str(group): mark.to_fields() for group, mark in self.nodes}
        fields = {"nodes": nodes, "inactive": list(self.inactive), "taken_us": self.taken_us}
        return fields | {"last_group": self.last_group}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CitusMark:
        try:
            nodes = {int(group): PostgresMark.from_fields(mark) for group, mark in fields["nodes"].items()}
            inactive = tuple(int(group) for group in fields["inactive"])
            last = int(fields.get("last_group", 0))  # marks of earlier releases have none
            return cls(tuple(sorted(nodes.items())), inactive, int(fields["taken_us"]), last)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidOffset("A mark of Citus lacks a field.", next_step=_NEXT_STEP) from None
