"""CitusMark: what a snapshot of a cluster contains: of each node, what the snapshot of that node does. Pure.

A change tells its node by its ``_position``. Groups are numbered as nodes join: one that the mark does not know, and
that was given before the snapshot, was removed before it, and the snapshot has all its changes; a later one joined
after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.citus.offset import CitusOffset, NodePlace, merged_rows
from headwater.sources.errors import InvalidOffset
from headwater.sources.postgres.mark import PostgresMark
from headwater.sources.postgres.offset import POSITION_DTYPE, POSITION_TYPE, PostgresOffset

_NEXT_STEP = "Give the text that to_json() wrote."


@dataclass(frozen=True, slots=True)
class CitusMark:
    """What one snapshot contains.

    :ivar nodes: pairs of a group and its mark, ascending.
    :ivar inactive: groups that the cluster had and did not use: nothing of theirs is in the snapshot.
    :ivar taken_us: when it was taken, microseconds since 1970.
    :ivar last_group: the last that the cluster had given to a node by then, be it removed since.
    """

    nodes: tuple[tuple[int, PostgresMark], ...]
    inactive: tuple[int, ...] = ()
    taken_us: int = 0
    last_group: int = 0

    @property
    def low(self) -> CitusOffset:
        """Everything that committed before it is in the snapshot."""
        return self._place({group: mark.low for group, mark in self.nodes})

    @property
    def high(self) -> CitusOffset:
        """Nothing that committed after it is in the snapshot."""
        return self._place({group: mark.high for group, mark in self.nodes})

    def _place(self, places: Mapping[int, PostgresOffset]) -> CitusOffset:
        return CitusOffset({group: NodePlace(place) for group, place in places.items()}, (), self.taken_us)

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """For each ``_position`` of a change: whether the snapshot has it already."""
        rows = merged_rows(positions)
        groups = rows["group"].astype(np.int64)
        newest = max((group for group, _ in self.nodes), default=-1)
        contained: NDArray[np.bool_] = (groups <= max(newest, self.last_group)) & ~np.isin(groups, self.inactive)
        for group, mark in self.nodes:
            chosen = np.flatnonzero(groups == group)
            if not chosen.size:
                continue
            of_node = np.empty(len(chosen), POSITION_DTYPE)
            for name in ("commit_lsn", "seq", "xid"):
                of_node[name] = rows[name][chosen]
            known = pa.Array.from_buffers(POSITION_TYPE, len(of_node), [None, pa.py_buffer(of_node)])
            contained[chosen] = mark.contains(known)
        return contained

    def unseen(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        """Those changes, all committed before the snapshot was taken, that it does not show yet.

        Those of a node that is not in use come from the log alone: no snapshot will show them, and none is waited for.
        """
        unused = np.isin(merged_rows(positions)["group"].astype(np.int64), self.inactive)
        unseen: NDArray[np.bool_] = ~self.contains(positions) & ~unused
        return unseen

    def to_json(self) -> str:
        nodes = {str(group): json.loads(mark.to_json())["Postgres"] for group, mark in self.nodes}
        fields = {"nodes": nodes, "inactive": list(self.inactive), "taken_us": self.taken_us}
        fields["last_group"] = self.last_group
        return json.dumps({"Citus": fields}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> CitusMark:
        """What :meth:`to_json` keeps beneath the kind. :raises InvalidOffset: a field is missing."""
        try:
            nodes = {int(group): PostgresMark.from_fields(mark) for group, mark in fields["nodes"].items()}
            inactive = tuple(int(group) for group in fields["inactive"])
            last = int(fields.get("last_group", 0))  # marks of earlier releases have none
            return cls(tuple(sorted(nodes.items())), inactive, int(fields["taken_us"]), last)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidOffset("A mark of Citus lacks a field.", next_step=_NEXT_STEP) from None
