"""Parts of a versioned table: what of its vnodes a plan reads, and how a table is walked through. Pure.

A part is a range of whole vnodes, or a range of keys inside one vnode. Vnodes are walked through in order, each from
where it stands, and cut at the first keys of their blocks: a table whose vnodes are large is resumed at a block, one
whose vnodes are small at a vnode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headwater.backfill.snapshot.state import BackfillState, VnodeProgress


class Block(Protocol):
    """About how many rows of a vnode begin at a key."""

    @property
    def vnode(self) -> int: ...
    @property
    def first(self) -> bytes: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class VnodePart:
    """The vnodes in ``[first, end)``; with *start* or *stop*: of one vnode the keys in ``[start, stop)``.

    :ivar rows: about how many.
    """

    first: int
    end: int
    rows: int
    start: bytes | None = None
    stop: bytes | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has all keys of its vnodes."""
        return self.start is None and self.stop is None

    def to_json(self) -> list[Any]:
        return [self.first, self.end, self.rows, self.start and self.start.hex(), self.stop and self.stop.hex()]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> VnodePart:
        first, end, rows, start, stop = value
        return cls(first, end, rows, *(None if key is None else bytes.fromhex(key) for key in (start, stop)))


@dataclass(frozen=True, slots=True)
class VnodeFilter:
    """Which changes of a table are delivered while its snapshot is read: those of *parts*, each after its epoch."""

    parts: tuple[tuple[VnodePart, int], ...]


class Layout:
    """Where the rows of a version are, about: by vnode, the keys at which its blocks begin and their rows."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        cuts: dict[int, dict[bytes, int]] = {}
        self.size = 0
        for block in blocks:
            found = cuts.setdefault(block.vnode, {})
            found[block.first] = found.get(block.first, 0) + block.rows
            self.size += block.bytes
        self._cuts = {vnode: sorted(found.items()) for vnode, found in sorted(cuts.items())}
        self._spread()
        self._rows = {vnode: sum(rows for _, rows in found) for vnode, found in self._cuts.items()}

    def _spread(self) -> None:
        """A block may go on in vnodes that have no beginning of one: its rows are theirs, too, about evenly."""
        vnodes = list(self._cuts)
        place = 0
        while place < len(vnodes):
            after = place + 1
            while after < len(vnodes) and not sum(rows for _, rows in self._cuts[vnodes[after]]):
                after += 1
            shared = vnodes[place:after]
            key, rows = self._cuts[shared[0]][-1]
            share, rest = divmod(rows, len(shared))
            self._cuts[shared[0]][-1] = (key, share + rest)
            for vnode in shared[1:]:
                self._cuts[vnode] = [(self._cuts[vnode][0][0], share)]
            place = after

    def rows(self, vnode: int) -> int:
        return self._rows.get(vnode, 0)

    def pieces(self, vnode: int, start: bytes | None) -> Iterator[tuple[bytes | None, int]]:
        """The rest of *vnode* from *start* on, cut at blocks: up to which key, and about how many rows.

        The last piece has no end. Rows of a block that *start* is inside of were counted when it was begun.
        """
        cuts = self._cuts.get(vnode, [])
        rows = 0
        for key, following in cuts:
            if start is not None and key < start:
                continue
            if key != start and (start is not None or key != cuts[0][0]):
                yield key, rows
                rows = 0
            rows += following
        yield None, rows


def unfinished(state: BackfillState) -> dict[int, VnodeProgress | None]:
    """The vnodes that have not finished what they are reading, and where they stand."""
    return {vnode: row for vnode, row in state.items() if row is None or not row.is_finished}


def hand_out(
    state: BackfillState, vnodes: Mapping[int, VnodeProgress | None], layout: Layout, epoch: int, budget: int
) -> list[VnodePart]:
    """Parts of about *budget* rows at most, one at least, of *vnodes* from where they stand; *state* is moved past
    them, and at *epoch* then.
    """
    made: list[VnodePart] = []
    left = budget
    for vnode, before in vnodes.items():
        start, counted = (None, 0) if before is None else (before.position, before.row_count)
        pieces = taken = 0
        stop: bytes | None = None
        for end, rows in layout.pieces(vnode, start):
            if (made or pieces) and taken + rows > left:
                break
            pieces, taken, stop = pieces + 1, taken + rows, end
        if not pieces:
            break
        made.append(VnodePart(vnode, vnode + 1, taken, start, stop))
        state.update(vnode, VnodeProgress(epoch, counted + taken, stop))
        left -= taken
        if stop is not None:
            break
    return joined(made)


def take_back(state: BackfillState, parts: Iterable[VnodePart], epoch: int) -> None:
    """*parts*, the newest that were handed out, were not read after all."""
    for part in parts:
        for vnode in range(part.first, part.end):
            if part.start is None:
                state.take_back(vnode, None)
                continue
            known = state.get(vnode)
            rows = 0 if known is None else max(0, known.row_count - part.rows)
            state.take_back(vnode, VnodeProgress(epoch, rows, part.start))


def joined(parts: Iterable[VnodePart]) -> list[VnodePart]:
    """*parts*, in order, with neighbouring whole vnodes as one."""
    made: list[VnodePart] = []
    for part in parts:
        last = made[-1] if made else None
        if last is not None and last.is_whole and part.is_whole and last.end == part.first:
            made[-1] = VnodePart(last.first, part.end, last.rows + part.rows)
        else:
            made.append(part)
    return made


def groups(parts: Sequence[VnodePart], layout: Layout, count: int) -> list[list[VnodePart]]:
    """*parts* for at most *count* tasks, about the same number of rows each; whole vnodes are told apart for that."""
    single = [
        piece
        for part in parts
        for piece in (
            [VnodePart(vnode, vnode + 1, layout.rows(vnode)) for vnode in range(part.first, part.end)]
            if part.is_whole
            else [part]
        )
    ]
    total = sum(max(piece.rows, 1) for piece in single)
    made: list[list[VnodePart]] = []
    passed = 0
    for piece in single:
        if not made or passed * count >= total * len(made):
            made.append([])
        made[-1].append(piece)
        passed += max(piece.rows, 1)
    return [joined(group) for group in made]
