"""A query's delivery without Spark: nine batches by the coordinator, of a process that may be killed or stopped.

It takes over from the process before it (recovery with the next generation), goes on after what its consumer of the
log has, stages each batch, has it committed, and lets the log forget it.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from tests.crash.sinks.deliveries import LONG, WIDE, WIDER, tune
from tests.db.sinks.cases import Place
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, random_chunk
from tests.query_state import coordinating
from tests.store.sinks.file_sinks import (
    DELETE,
    INSERT,
    ORDERS,
    UPDATE,
    IntegerOrder,
    history_part,
    log_rows,
    order,
    own_rows,
    position,
)

from headwater import failpoints
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.reader import KvLogStoreReader
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.delivery import DeliveryState, read_deliveries
from headwater.sinks.errors import SinkError
from headwater.sinks.open import option_names
from headwater.sinks.sink import Committed, Mode, Sink, Staged, Token
from headwater.sources.table import SourceTable
from headwater.state import open_reader, open_writer
from headwater.state.query_store import open_query_store, own_state
from headwater.stream import Epoch, EpochPair
from headwater.stream.vnode import hash_keys

QUERY, BACKFILL, LOG = "q", "b1", "public.orders"
IDLE_SECONDS: Final = 2
delivering = [0]
"""The number of the batch that this process delivers."""


@dataclass(frozen=True)
class Delivered:
    """One batch of the delivery; its epoch is its number."""

    epoch: int
    plan: int
    table: SourceTable
    changes: Sequence[tuple[Any, ...]] = ()
    history: Sequence[dict[str, Any]] = ()
    part: dict[str, Any] = field(default_factory=dict)
    truncated: int | None = None

    def staged(self, sink: Sink, generation: int) -> list[Staged]:
        token = Token(QUERY, BACKFILL, self.epoch - 1, self.epoch, self.plan, generation=generation)
        made: list[Staged] = []
        if self.changes or self.truncated is not None:
            truncated = None if self.truncated is None else (self.epoch, self.truncated)
            rows = log_rows(self.table, self.changes, self.epoch)
            made.append(sink.stage_changes(self.table, token, iter([rows]), truncated))
        if self.history:
            part = replace(history_part(**self.part), position=position(self.plan))
            made.append(sink.stage_history(self.table, token, part, iter([own_rows(self.table, self.history)])))
        return made


def batches() -> list[Delivered]:
    """History and changes, large ones, columns that come and become wider, a range that is read again, a TRUNCATE."""
    known = hash_keys(own_rows(WIDE, [order(1000), order(30)]), ("id",))
    again = {"ranges": [(10, 15)], "replaces": True, "order": IntegerOrder()}
    return [
        Delivered(1, 1, ORDERS, [(INSERT, order(1000))], [order(key) for key in range(20)]),
        Delivered(2, 1, ORDERS, [(UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(1001))]),
        Delivered(3, 1, ORDERS, [(INSERT, order(key, LONG)) for key in range(2000, 5000)]),
        Delivered(4, 1, WIDE, [(UPDATE, {**order(3, "noted"), "note": "n"}), (DELETE, order(1001))]),
        Delivered(5, 2, WIDE, [(INSERT, order(40))], [order(1000, "read"), order(30), order(31)], {"changed": known}),
        Delivered(6, 2, WIDER, [(INSERT, {**order(41), "total": Decimal("0.0001")})]),
        Delivered(7, 3, WIDER, (), [order(10, "again")], again),
        Delivered(8, 3, WIDER, [(INSERT, order(50)), (INSERT, order(51, "kept"))], truncated=1),
        Delivered(9, 3, WIDER, [(INSERT, order(52)), (UPDATE, order(51, None, "2.00"), "status")]),
    ]


LAST: Final = 9


def make_log(folder: Path) -> Path:
    """A store with a log of as many epochs."""
    location = folder / "log"
    with open_writer(str(location)) as store:
        factory = KvLogStoreFactory(store)
        log = factory.log(LOG, SCHEMA, KEY)
        writer = factory.writer(log)
        writer.init(EpochPair(epoch(1), Epoch(0)))
        for number in range(1, LAST + 1):
            writer.write_chunk(random_chunk(random.Random(number), 3))
            writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))
        factory.close()
    return location


@dataclass(frozen=True)
class Delivery:
    """What a process is told. :ivar upto: it ends after this batch. :ivar output: for what it found."""

    place: Place
    store: str
    generation: int
    armed: str = ""
    upto: int = LAST
    output: str = ""

    @property
    def sink(self) -> Sink:
        soon = {"file_bytes": 64 << 10, "merge_runs": 2, "retention_seconds": 0}
        known = option_names(self.place.case.kind)
        return self.place.sink(**{name: value for name, value in soon.items() if name in known})


def deliver(delivery: Delivery) -> None:
    """Recover, and go on."""
    tune()
    _end_sleepers_soon()
    failpoints.arm(delivery.armed)
    sink = delivery.sink
    with (
        open_query_store(own_state(delivery.store, QUERY), QUERY, takeover=True) as store,
        open_reader(delivery.store) as source,
    ):
        coordinator, reader = Coordinator(store), KvLogStoreReader(source, store)
        reader.init([LOG])
        coordinator.recover(sink, BACKFILL, [WIDER])
        for batch in batches():
            if reader.consumer(LOG).delivered() < epoch(batch.epoch) <= epoch(delivery.upto):
                delivering[0] = batch.epoch
                coordinator.deliver(sink, batch.staged(sink, coordinator.generation))
                coordinator.flush()
                reader.truncate({LOG: epoch(batch.epoch)})


def found(delivery: Delivery) -> None:
    """Deliver, and write down how often each failpoint was passed, and what there is then."""
    hits: Counter[str] = Counter()
    original = failpoints.hit

    def counted(name: str) -> None:
        hits[name] += 1
        original(name)

    failpoints.hit = counted
    deliver(delivery)
    failpoints.hit = original
    Path(delivery.output).write_bytes(pickle.dumps((dict(hits), state(delivery))))


def look(delivery: Delivery) -> None:
    """Write down what there is."""
    Path(delivery.output).write_bytes(pickle.dumps(({}, state(delivery))))


def begin_again(delivery: Delivery) -> None:
    """Forget everything, as a sink does that is dropped and resumed, and begin again; write down what there is."""
    tune()
    _end_sleepers_soon()
    with open_query_store(own_state(delivery.store, QUERY), QUERY, takeover=True) as store:
        store.clear()
    with coordinating(own_state(delivery.store, QUERY), QUERY) as coordinator:
        coordinator.recover(delivery.sink, "b2", [WIDER])
    look(delivery)


def stop_and_go_on(delivery: Delivery) -> None:
    """Deliver; this process stops itself at the failpoint that is armed, in the batch with the number behind ``@``, and
    once it is continued writes down how it ended.
    """
    step, _, number = delivery.armed.partition("@")
    is_stopped = False

    def hit(name: str) -> None:
        nonlocal is_stopped
        if name == step and delivering[0] >= int(number) and not is_stopped:
            is_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    failpoints.hit = hit
    ended = ""
    try:
        deliver(replace(delivery, armed=""))
    except SinkError as error:
        ended = f"{type(error).__name__}: {error}"
    Path(delivery.output).write_text(ended)


def _end_sleepers_soon() -> None:
    """A server ends a session that sleeps in a transaction after a minute; a test does not wait for so long."""
    from headwater.sinks import mysql_target, postgres_session

    mysql_target.IDLE_SECONDS = IDLE_SECONDS  # type: ignore[attr-defined]
    postgres_session._SETTINGS["idle_in_transaction_session_timeout"] = f"{IDLE_SECONDS}s"


def state(delivery: Delivery) -> State:
    sink = delivery.sink
    rows = delivery.place.rows(sink, WIDER)
    deliveries = read_deliveries(own_state(delivery.store, QUERY), QUERY)
    with LogConsumer.open(delivery.store, LOG, QUERY, takeover=True) as consumer:
        truncated = consumer.delivered()
    return State(
        rows=tuple(sorted(repr(sorted(row.items())) for row in rows)),
        keys=tuple(sorted((row.get("_commit_version", 0), row["id"]) for row in rows)),
        committed=sink.committed(WIDER, QUERY, BACKFILL),
        records=tuple((record.epoch, record.state) for record in deliveries),
        truncated=truncated.ms,
        left=tuple(delivery.place.left()),
    )


@dataclass(frozen=True)
class State:
    """What there is after a delivery."""

    rows: tuple[str, ...]
    keys: tuple[tuple[int, int], ...]
    committed: Committed
    records: tuple[tuple[int, DeliveryState], ...]
    truncated: int
    left: tuple[str, ...]

    def problem(self, mode: Mode, clean: State) -> str | None:
        """What is wrong; ``None``: nothing."""
        if mode is not Mode.HISTORY and len(set(self.keys)) < len(self.keys):
            return "a change is there twice"
        if self.rows != clean.rows:
            return f"{len(self.rows)} rows, {len(set(self.rows) ^ set(clean.rows))} differ from a run without a kill"
        if self.committed != Committed(LAST, 3):
            return f"it has {self.committed}"
        if self.records != ((LAST, DeliveryState.COMMITTED),):
            return f"the coordinator has {self.records}"
        if self.truncated != LAST:
            return f"the log is kept from epoch {self.truncated}"
        return f"{self.left[0]} is left behind" if self.left else None
