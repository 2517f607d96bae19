"""Mutation: what a barrier may carry. Every operator applies it after it has passed the barrier on.

==========================  ==============================================================================
mutation                    effect from the next epoch on
==========================  ==============================================================================
:class:`Pause`              snapshot reads stop; live changes flow on
:class:`Resume`             snapshot reads go on
:class:`Throttle`           a target reads at most so many rows per second
:class:`Resnapshot`         a target, or a part of it, is read once more
:class:`UpdateVnodeBitmap`  the named owners own these vnodes
:class:`Stop`               the named owners, or all, end after this barrier
==========================  ==============================================================================

An *owner* is the name of a reader or writer. Owners are kept in order, so equal mutations have equal JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headwater.stream.bitmap import VnodeBitmap
from headwater.stream.errors import BarrierError, FormatError

ALL_TARGETS: Final = "*"


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop reading snapshots of *target*. :raises BarrierError: an empty target."""

    target: str = ALL_TARGETS

    def __post_init__(self) -> None:
        _named(self.target, "target")


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on reading snapshots of *target*. :raises BarrierError: an empty target."""

    target: str = ALL_TARGETS

    def __post_init__(self) -> None:
        _named(self.target, "target")


@dataclass(frozen=True, slots=True)
class Throttle:
    """Limit the rows per second of *target*: the name of a table or sink, or ``*`` for all.

    :ivar rows_per_second: None is unlimited, 0 stands still.
    :raises BarrierError: a negative rate or an empty target.
    """

    rows_per_second: int | None
    target: str = ALL_TARGETS

    def __post_init__(self) -> None:
        rate = self.rows_per_second
        if rate is not None and (type(rate) is not int or rate < 0):
            raise BarrierError(
                f"Received rows_per_second={rate!r}; valid values are integers from 0, or None.",
                next_step="Use None for no limit and 0 to stand still.",
            )
        _named(self.target, "target")


@dataclass(frozen=True, slots=True)
class Resnapshot:
    """Read *target* once more: all of it, or a range of its keys, both ends included, or some of its columns.

    :ivar start: the values of a key as text; empty: from the first key on. :ivar end: empty: to the last key.
    :raises BarrierError: an empty target.
    """

    target: str = ALL_TARGETS
    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _named(self.target, "target")
        for field in ("start", "end", "columns"):
            object.__setattr__(self, field, tuple(getattr(self, field)))


@dataclass(frozen=True, slots=True)
class UpdateVnodeBitmap:
    """Give owners new vnode bitmaps. Make one with :meth:`of`.

    The bitmaps are disjoint and of one count; an owner that is not named keeps what it has.

    :raises BarrierError: a vnode with two owners, bitmaps of different counts, or no owner.
    """

    bitmaps: tuple[tuple[str, VnodeBitmap], ...]

    @classmethod
    def of(cls, bitmaps: Mapping[str, VnodeBitmap]) -> UpdateVnodeBitmap:
        """From owner → bitmap."""
        return cls(tuple(sorted(bitmaps.items())))

    def __post_init__(self) -> None:
        _owners(self.bitmaps)
        first_owner, taken = self.bitmaps[0]
        for owner, bitmap in self.bitmaps[1:]:
            if bitmap.count != taken.count:
                raise BarrierError(
                    f"Received {taken.count} vnodes for {first_owner!r} and {bitmap.count} for {owner!r}.",
                    next_step="Use one vnode count for all owners of a table.",
                )
            if not bitmap.isdisjoint(taken):
                shared = (bitmap & taken).ranges()[0].start
                raise BarrierError(
                    f"Received vnode {shared} for {owner!r} and for another owner.",
                    next_step="Give every vnode one owner: VnodeBitmap.split().",
                )
            taken |= bitmap

    def bitmap_of(self, owner: str) -> VnodeBitmap | None:
        """The new bitmap of *owner*, None if it keeps its own."""
        return dict(self.bitmaps).get(owner)

    @property
    def covers_all(self) -> bool:
        """Whether the named owners own every vnode."""
        count = self.bitmaps[0][1].count
        return sum(len(bitmap) for _, bitmap in self.bitmaps) == count


@dataclass(frozen=True, slots=True)
class Stop:
    """End after this barrier: the named owners, or everyone if none is named."""

    owners: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.owners) not in (tuple, list):
            raise BarrierError("Received owners that are no tuple.", next_step="Give a tuple of names.")
        for owner in self.owners:
            _named(owner, "owner")
        object.__setattr__(self, "owners", tuple(sorted(set(self.owners))))

    def stops(self, owner: str) -> bool:
        """Whether *owner* ends."""
        return not self.owners or owner in self.owners


TargetMutation = Pause | Resume | Throttle | Resnapshot
"""Those that are for one table or sink, or for all."""
Mutation = TargetMutation | UpdateVnodeBitmap | Stop


def _named(name: object, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise BarrierError(f"Received {what} {name!r}; a {what} has a name.", next_step=f"Name the {what}.")


def _owners(pairs: tuple[tuple[str, Any], ...]) -> None:
    names = [owner for owner, _ in pairs]
    if not names:
        raise BarrierError("Received no owner.", next_step="Name at least one owner.")
    for name in names:
        _named(name, "owner")
    if names != sorted(set(names)):
        raise BarrierError("Received owners out of order or twice.", next_step="Use the class's of().")


def mutation_to_json(mutation: Mutation) -> dict[str, Any]:
    """A value for :func:`json.dumps`: the fields and the ``type``."""
    match mutation:
        case Pause(target=target):
            return {"type": "pause"} | _other_target(target)
        case Resume(target=target):
            return {"type": "resume"} | _other_target(target)
        case Throttle(rows_per_second=rate, target=target):
            return {"type": "throttle", "rows_per_second": rate, "target": target}
        case Resnapshot(target=target, start=start, end=end, columns=columns):
            part = {"start": list(start), "end": list(end), "columns": list(columns)}
            return {"type": "resnapshot", "target": target} | part
        case UpdateVnodeBitmap(bitmaps=bitmaps):
            return {"type": "update_vnode_bitmap", "bitmaps": {owner: bitmap.to_json() for owner, bitmap in bitmaps}}
        case Stop(owners=owners):
            return {"type": "stop", "owners": list(owners)}


def _other_target(target: str) -> dict[str, str]:
    """The field of a target that is not all: the first release that wrote mutations had none."""
    return {} if target == ALL_TARGETS else {"target": target}


_READERS: Final[dict[str, Callable[[dict[str, Any]], Mutation]]] = {
    "pause": lambda value: Pause(**value),
    "resume": lambda value: Resume(**value),
    "throttle": lambda value: Throttle(**value),
    "resnapshot": lambda value: Resnapshot(**value),
    "update_vnode_bitmap": lambda value: UpdateVnodeBitmap.of(
        {owner: VnodeBitmap.from_json(bitmap) for owner, bitmap in value.pop("bitmaps").items()}, **value
    ),
    "stop": lambda value: Stop(**value),
}


def mutation_from_json(value: Any) -> Mutation:
    """The inverse of :func:`mutation_to_json`.

    :raises FormatError: an unknown type or another shape.
    :raises BarrierError: fields that contradict each other.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or value["type"] not in _READERS:
        raise FormatError("mutation", f"its type is none of {', '.join(_READERS)}")
    fields = dict(value)
    try:
        return _READERS[fields.pop("type")](fields)
    except (KeyError, AttributeError, TypeError):
        raise FormatError("mutation", f"the fields of {value['type']!r} are others") from None
