"""Mutation: what a barrier may carry. Every operator applies it after it has passed the barrier on.

===================  ================================================
mutation             effect from the next epoch on
===================  ================================================
:class:`Pause`       snapshot reads stop; live changes flow on
:class:`Resume`      snapshot reads go on
:class:`Throttle`    a target reads at most this many rows per second
:class:`Resnapshot`  a target, or a part of it, is read once more
===================  ================================================

A *target* is the name of a table or sink. Equal mutations have equal JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from headwater.stream.errors import BarrierError, FormatError

ALL_TARGETS: Final = "*"


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop reading snapshots of *target*. :raises BarrierError: an empty target."""

    target: str = ALL_TARGETS

    def __post_init__(self) -> None:
        _named(self.target)


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on reading snapshots of *target*. :raises BarrierError: an empty target."""

    target: str = ALL_TARGETS

    def __post_init__(self) -> None:
        _named(self.target)


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
        _named(self.target)


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
        _named(self.target)
        for field in ("start", "end", "columns"):
            object.__setattr__(self, field, tuple(getattr(self, field)))


Mutation = Pause | Resume | Throttle | Resnapshot


def _named(target: object) -> None:
    if not isinstance(target, str) or not target:
        raise BarrierError(f"Received target {target!r}; a target has a name.", next_step="Name the target.")


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


def _other_target(target: str) -> dict[str, str]:
    """The field of a target that is not all: the first release that wrote mutations had none."""
    return {} if target == ALL_TARGETS else {"target": target}


_READERS: Final[dict[str, Callable[[dict[str, Any]], Mutation]]] = {
    "pause": lambda value: Pause(**value),
    "resume": lambda value: Resume(**value),
    "throttle": lambda value: Throttle(**value),
    "resnapshot": lambda value: Resnapshot(**value),
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
