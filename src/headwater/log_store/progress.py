"""How far a log is consumed, vnode by vnode: nothing, some vnodes, or all of them at one place. Pure.

============  ==============================================  ==================================
from          ``apply_ended`` of some of its vnodes           ``apply_aligned``
============  ==============================================  ==================================
none          aligned                                         aligned
per vnode     per vnode: the places are merged                aligned; the bitmap may grow
aligned       per vnode: spread over its vnodes, merged       aligned; the bitmap may grow
============  ==============================================  ==================================

Vnodes whose places become the same are aligned again. A vnode's place never goes back, and after a place inside an
epoch the next one is in the same epoch: an epoch is left only by its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from headwater.log_store.errors import LogCorrupt, ProgressConflict
from headwater.stream import Epoch, VnodeBitmap

_END = float("inf")


@total_ordering
@dataclass(frozen=True, slots=True)
class StoragePlace:
    """How far a vnode is done: up to a seq id of an epoch, or (``seq`` is ``None``) the whole of it."""

    epoch: Epoch
    seq: int | None = None

    def _rank(self) -> tuple[int, float]:
        return self.epoch, _END if self.seq is None else self.seq

    def __lt__(self, other: StoragePlace) -> bool:
        return self._rank() < other._rank()


class LogStoreVnodeProgress:
    """Progress over the vnodes of one log.

    :param vnode_count: of the log; bitmaps of another count are refused.
    """

    def __init__(self, vnode_count: int, places: Mapping[int, StoragePlace] | None = None) -> None:
        self.vnode_count = vnode_count
        self._per_vnode: dict[int, StoragePlace] = dict(places or {})
        self._aligned: tuple[VnodeBitmap, StoragePlace] | None = None

    @classmethod
    def aligned(cls, bitmap: VnodeBitmap, place: StoragePlace) -> LogStoreVnodeProgress:
        made = cls(bitmap.count)
        made._aligned = (bitmap, place)
        return made

    @property
    def kind(self) -> str:
        """``none``, ``per_vnode`` or ``aligned``."""
        if self._aligned is not None:
            return "aligned"
        return "per_vnode" if self._per_vnode else "none"

    def place_of(self, vnode: int) -> StoragePlace | None:
        """How far *vnode* is done."""
        if self._aligned is not None:
            bitmap, place = self._aligned
            return place if vnode in bitmap else None
        return self._per_vnode.get(vnode)

    def places(self) -> Iterator[tuple[int, StoragePlace]]:
        """Each vnode that has a place, in order."""
        if self._aligned is not None:
            bitmap, place = self._aligned
            for vnode in bitmap:
                yield vnode, place
        else:
            yield from sorted(self._per_vnode.items())

    def bitmap(self) -> VnodeBitmap:
        """The vnodes that have a place."""
        if self._aligned is not None:
            return self._aligned[0]
        return VnodeBitmap.of(self._per_vnode, self.vnode_count)

    def minimum(self, owned: VnodeBitmap) -> StoragePlace | None:
        """The place that every vnode of *owned* has reached; ``None`` when one of them has none."""
        if self._aligned is not None and owned <= self._aligned[0]:
            return self._aligned[1]
        places = [self.place_of(vnode) for vnode in owned]
        known = [place for place in places if place is not None]
        return min(known) if known and len(known) == len(places) else None

    def apply_aligned(self, bitmap: VnodeBitmap, epoch: Epoch, seq: int | None = None) -> None:
        """All vnodes of *bitmap* are at one place: usually the end of *epoch*.

        :raises ProgressConflict: a vnode with a place is not in *bitmap*, or would go back.
        """
        place = StoragePlace(epoch, seq)
        if not self.bitmap() <= bitmap:
            raise ProgressConflict("An aligned place must cover every vnode that has made progress.")
        for vnode, _ in self.places():
            self._check(vnode, place)
        self._per_vnode = {}
        self._aligned = (bitmap, place)

    def apply_ended(self, bitmap: VnodeBitmap, epoch: Epoch) -> None:
        """*epoch* ended for the vnodes of *bitmap*; the others stay where they are.

        :raises ProgressConflict: a vnode would go back. Nothing is applied then.
        """
        if not bitmap:
            return
        if self.bitmap() <= bitmap:
            self.apply_aligned(bitmap, epoch)
            return
        place = StoragePlace(epoch)
        for vnode in bitmap:
            self._check(vnode, place)
        self._per_vnode = dict(self.places()) | dict.fromkeys(bitmap, place)
        self._aligned = None
        places = set(self._per_vnode.values())
        if len(places) == 1:
            self._aligned = (VnodeBitmap.of(self._per_vnode, self.vnode_count), place)
            self._per_vnode = {}

    def _check(self, vnode: int, place: StoragePlace) -> None:
        old = self.place_of(vnode)
        if old is None:
            return
        inside = old.seq is not None
        if place < old or (inside and place.epoch != old.epoch):
            raise ProgressConflict(
                f"Vnode {vnode} is at epoch {old.epoch}{f', seq {old.seq}' if inside else ''}; it cannot go to epoch "
                f"{place.epoch}{'' if place.seq is None else f', seq {place.seq}'}."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogStoreVnodeProgress) and dict(self.places()) == dict(other.places())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<LogStoreVnodeProgress {self.kind} {len(self.bitmap())} vnodes>"

    def to_json(self) -> dict[str, Any]:
        """For the state table: ranges of vnodes at one place, as few as they come."""
        groups: dict[StoragePlace, list[int]] = {}
        for vnode, place in self.places():
            groups.setdefault(place, []).append(vnode)
        return {
            "count": self.vnode_count,
            "places": [
                [int(place.epoch), place.seq, VnodeBitmap.of(vnodes, self.vnode_count).to_json()]
                for place, vnodes in sorted(groups.items())
            ],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> LogStoreVnodeProgress:
        """The inverse of :meth:`to_json`. :raises LogCorrupt: something else."""
        try:
            groups = [
                (VnodeBitmap.from_json(bitmap), StoragePlace(Epoch(epoch), seq))
                for epoch, seq, bitmap in stored["places"]
            ]
            made = cls(stored["count"], {vnode: place for bitmap, place in groups for vnode in bitmap})
        except (KeyError, TypeError, ValueError) as error:
            raise LogCorrupt("A stored progress cannot be read.") from error
        if any(bitmap.count != made.vnode_count for bitmap, _ in groups):
            raise LogCorrupt("A stored progress is of two vnode counts.")
        return cls.aligned(*groups[0]) if len(groups) == 1 else made
