"""The write batch: an ordered list of puts, deletes and range deletes that becomes visible as one.

A batch is plain memory, and owns it, until :meth:`StateStore.seal` makes it durable under an epoch. Steps apply in
the order in which they were added. Runs of puts stay together as a list of pairs, because that is what engines write
fastest. A batch can be sealed once or kept and tried again after an error: sealing does not consume it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

from headwater.state.errors import InvalidKey, InvalidValue

MAX_KEY_BYTES = 480
"""Longest key of every engine (LMDB holds 511; the rest is for the engine's own prefixes)."""

Value: TypeAlias = bytes | bytearray | memoryview

_first = itemgetter(0)
_second = itemgetter(1)


@dataclass(slots=True)
class Puts:
    """A run of puts."""

    items: list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget one key; forgetting an absent key is no error."""

    key: bytes


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """Forget all keys in ``[start, end)``; ``None`` is open on that side."""

    start: bytes | None
    end: bytes | None


Step: TypeAlias = Puts | Delete | DeleteRange


def check_key(key: bytes) -> None:
    """:raises InvalidKey: when no engine could hold *key*."""
    if not isinstance(key, bytes):
        raise InvalidKey(f"A key is bytes, not {type(key).__name__}.")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise InvalidKey(f"A key has 1 to {MAX_KEY_BYTES} bytes; this one has {len(key)}.")


def check_bounds(start: bytes | None, end: bytes | None) -> None:
    """:raises InvalidKey: a bound of a range is neither bytes nor ``None``."""
    for bound in (start, end):
        if not isinstance(bound, bytes | None):
            raise InvalidKey(f"A bound of a range is bytes, not {type(bound).__name__}.")


def _owned(value: Value) -> bytes:
    """*value* as bytes of the batch's own: a view may change or end before the seal."""
    if type(value) is bytes:
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidValue(f"A value is bytes or a memoryview, not {type(value).__name__}.")
    try:
        return bytes(value)
    except (ValueError, BufferError) as error:
        raise InvalidValue("A value is a memoryview that was released.") from error


class WriteBatch:
    """Writes that are sealed together."""

    __slots__ = ("__weakref__", "_steps")

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def put(self, key: bytes, value: Value) -> None:
        """Set *key* to *value*.

        :raises InvalidKey: not bytes, empty or too long.
        :raises InvalidValue: not bytes.
        """
        check_key(key)
        owned = _owned(value)
        self._puts().append((key, owned))

    def put_many(self, items: Iterable[tuple[bytes, Value]]) -> None:
        """Set many keys; the fastest way in, above all when the keys are sorted.

        :raises InvalidKey: one of the keys is not bytes, empty or too long. Nothing is added then.
        :raises InvalidValue: one of the values is not bytes. Nothing is added then.
        """
        added: list[Any] = list(items)
        if not added:
            return
        kinds = set(map(type, map(_first, added)))
        if kinds != {bytes}:
            raise InvalidKey(f"A key is bytes, not {', '.join(sorted(k.__name__ for k in kinds - {bytes}))}.")
        lengths = set(map(len, map(_first, added)))
        if min(lengths) == 0 or max(lengths) > MAX_KEY_BYTES:
            raise InvalidKey(f"A key has 1 to {MAX_KEY_BYTES} bytes; these have {min(lengths)} to {max(lengths)}.")
        if set(map(type, map(_second, added))) != {bytes}:
            added = [(key, _owned(value)) for key, value in added]
        self._puts().extend(added)

    def delete(self, key: bytes) -> None:
        """Forget *key*. :raises InvalidKey: not bytes, empty or too long."""
        check_key(key)
        self._steps.append(Delete(key))

    def delete_range(self, start: bytes | None = None, end: bytes | None = None) -> None:
        """Forget all keys in ``[start, end)``. :raises InvalidKey: a bound is not bytes."""
        check_bounds(start, end)
        self._steps.append(DeleteRange(start or None, end))

    def delete_prefix(self, prefix: bytes) -> None:
        """Forget all keys that begin with *prefix*."""
        check_bounds(prefix, None)
        self._steps.append(DeleteRange(prefix or None, prefix_end(prefix)))

    def extend(self, other: WriteBatch) -> None:
        """Add the steps of *other* after those of this batch."""
        for step in other.steps():
            if isinstance(step, Puts):
                self._puts().extend(step.items)
            else:
                self._steps.append(step)

    def steps(self) -> Iterator[Step]:
        """The steps in order, for engines."""
        return iter(self._steps)

    def __len__(self) -> int:
        """How many steps: each put counts as one."""
        return sum(len(step.items) if isinstance(step, Puts) else 1 for step in self._steps)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def _puts(self) -> list[tuple[bytes, bytes]]:
        if self._steps and isinstance(last := self._steps[-1], Puts):
            return last.items
        run = Puts([])
        self._steps.append(run)
        return run.items


def prefix_end(prefix: bytes) -> bytes | None:
    """The smallest key above all keys that begin with *prefix*; ``None`` when there is none.

    >>> prefix_end(b"a")
    b'b'
    >>> prefix_end(b"a\\xff")
    b'b'
    >>> prefix_end(b"\\xff") is None
    True
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None
