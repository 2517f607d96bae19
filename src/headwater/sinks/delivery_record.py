"""DeliveryRecord: what is durable of the deliveries of a query, in the query's state.

=========  ==============================================================  ===============================
state      meaning                                                         goes to
=========  ==============================================================  ===============================
PENDING    everything is staged; some tables may be committed              COMMITTED, ABORTED
COMMITTED  the sink has all tables of the batch                            (the next COMMITTED replaces it)
ABORTED    what was staged cannot be used: the batch is staged anew        (removed with what was staged)
=========  ==============================================================  ===============================
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Self

from headwater.state import Field, FieldType, Snapshot, StateTable, TableSchema

DELIVERIES = TableSchema(
    "deliveries",
    1,
    key=(Field("number", FieldType.INT),),
    value=(Field("record", FieldType.JSON), Field("staged", FieldType.BYTES)),
)
DELIVERY_STATE = TableSchema(
    "delivery_state", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
TABLE: Final = "table/"
"""Before the name of a table: the newest epoch with changes of it that was committed."""
PARKED: Final = "parked/"
SUSPECT: Final = "suspect/"
ACCOUNTED: Final = "accounted"
"""The tables of which no generation has a commit under way that neither a token nor a fence accounts for."""


class DeliveryState(Enum):
    PENDING = "pending"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One batch.

    :ivar generation: of the processes that staged it. :ivar epoch: up to which it has changes. :ivar plan: its newest.
    :ivar tables: rows by table; a table of which nothing was left has 0. :ivar changed: those with changes.
    :ivar since_ms: when it came to its state.
    """

    number: int
    state: DeliveryState
    generation: int
    epoch: int
    plan: int
    tables: Mapping[str, int] = field(default_factory=dict)
    changed: Sequence[str] = ()
    since_ms: int = 0
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "generation": self.generation,
            "epoch": self.epoch,
            "plan": self.plan,
            "tables": dict(self.tables),
            "changed": list(self.changed),
            "since_ms": self.since_ms,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, number: int, value: dict[str, Any]) -> Self:
        return cls(number=number, **(value | {"state": DeliveryState(value["state"])}))


def of_tables(state: StateTable, view: Snapshot, prefix: str) -> dict[str, Any]:
    rows = state.scan(view, 0)
    return {key[0].removeprefix(prefix): value[0] for key, value in rows if key[0].startswith(prefix)}


def now_ms() -> int:
    return time.time_ns() // 1_000_000
