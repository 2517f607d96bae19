"""Barrier: closes epoch ``prev`` and opens ``curr``.

===================  =======  ======  ==========================================================================
kind                 durable  drains  meaning
===================  =======  ======  ==========================================================================
``INITIAL``          no       no      first barrier after a start or recovery; no row belongs to its ``prev``
``BARRIER``          no       no      seals its epoch; a crash forgets it and the source sends it again
``CHECKPOINT``       yes      no      seals and makes durable, with all epochs since the last durable one
``SYNC_CHECKPOINT``  yes      yes     and returns only when the sinks have delivered everything up to it
===================  =======  ======  ==========================================================================

A barrier carries at most one mutation (:mod:`headwater.stream.mutation`). Barriers travel in plans and so in Spark's
offsets, which compare as text: :meth:`Barrier.to_json` has sorted keys, no blanks, ASCII only and a version, and
equal barriers have equal texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from headwater.errors import InputError
from headwater.stream.epoch import Epoch, EpochPair
from headwater.stream.errors import BarrierError, FormatError
from headwater.stream.mutation import Mutation, mutation_from_json, mutation_to_json

JSON_VERSION: Final = 1


class BarrierKind(StrEnum):
    """What a barrier promises."""

    INITIAL = "initial"
    BARRIER = "barrier"
    CHECKPOINT = "checkpoint"
    SYNC_CHECKPOINT = "sync_checkpoint"

    @property
    def is_durable(self) -> bool:
        """Whether the closed epoch survives a crash."""
        return self in (BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT)

    @property
    def drains(self) -> bool:
        """Whether the sinks have delivered everything up to it."""
        return self is BarrierKind.SYNC_CHECKPOINT


@dataclass(frozen=True, slots=True)
class Barrier:
    """One barrier.

    :raises BarrierError: only an ``INITIAL`` barrier may have the invalid epoch as ``prev``.
    """

    epoch: EpochPair
    kind: BarrierKind
    mutation: Mutation | None = None

    def __post_init__(self) -> None:
        if not self.epoch.prev.is_valid and self.kind is not BarrierKind.INITIAL:
            raise BarrierError(
                f"Received a barrier of kind {self.kind.value!r} that closes no epoch.",
                next_step="Begin a stream with a barrier of kind 'initial'.",
            )

    @property
    def closes(self) -> Epoch:
        """The epoch that this barrier seals: ``prev``."""
        return self.epoch.prev

    @property
    def opens(self) -> Epoch:
        """The epoch of the rows that follow: ``curr``."""
        return self.epoch.curr

    @property
    def is_durable(self) -> bool:
        """See :attr:`BarrierKind.is_durable`."""
        return self.kind.is_durable

    @property
    def drains(self) -> bool:
        """See :attr:`BarrierKind.drains`."""
        return self.kind.drains

    def to_json(self) -> str:
        """One line of JSON, the same for equal barriers."""
        value: dict[str, Any] = {
            "curr": int(self.epoch.curr),
            "kind": self.kind.value,
            "prev": int(self.epoch.prev),
            "v": JSON_VERSION,
        }
        if self.mutation is not None:
            value["mutation"] = mutation_to_json(self.mutation)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Barrier:
        """The inverse of :meth:`to_json`. Fields that this release does not know are refused, not dropped.

        :raises FormatError: not JSON, another version, or another shape.
        """
        try:
            value = json.loads(text)
        except ValueError:
            raise FormatError("Barrier", "it is not JSON") from None
        if not isinstance(value, dict):
            raise FormatError("Barrier", "it is not an object")
        if value.get("v") != JSON_VERSION:
            raise FormatError(
                "Barrier",
                f"its version is {value.get('v')!r} and this release reads {JSON_VERSION}",
                next_step="Upgrade Headwater to the release that wrote it.",
            )
        unknown = value.keys() - {"curr", "kind", "prev", "v", "mutation"}
        if unknown:
            raise FormatError("Barrier", f"it has the unknown field {min(unknown)!r}")
        try:
            mutation = mutation_from_json(value["mutation"]) if "mutation" in value else None
            pair = EpochPair(curr=Epoch(value["curr"]), prev=Epoch(value["prev"]))
            return cls(pair, BarrierKind(value["kind"]), mutation)
        except (KeyError, AttributeError, TypeError) as error:
            raise FormatError("Barrier", f"{type(error).__name__} in its fields") from None
        except FormatError:
            raise
        except InputError as error:
            raise FormatError("Barrier", error.message.rstrip(".")) from error
        except ValueError:
            kinds = ", ".join(kind.value for kind in BarrierKind)
            raise FormatError("Barrier", f"its kind is none of {kinds}") from None
