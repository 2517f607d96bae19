"""Random writes, barriers of all kinds, crashes, rescales, pauses, throttles and compactions over an upstream table:
after each step the downstream has exactly the rows of the epochs that it claims, each row once per vnode and epoch."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.property.backfill.upstream_machine import Owners
from tests.store.sinks.file_sinks import DELETE, INSERT, UPDATE, table_of
from tests.store.versioned.written import WrittenTable
from tests.unit.backfill.upstream_model import MemoryUpstream, Rows

from headwater.backfill.snapshot.consume_upstream.versioned import VersionedUpstream
from headwater.stream import BarrierKind, Mutation, Pause, Resume, Throttle
from headwater.versioned.compaction import compact

KEYS = st.integers(0, 24)
CHANGES = st.dictionaries(KEYS, st.one_of(st.none(), st.integers(0, 9)), max_size=20)
KINDS = st.sampled_from((BarrierKind.BARRIER, BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT))
ORDERS = st.sampled_from((Pause(), Resume(), Resume(), Throttle(0), Throttle(2), Throttle(None), Throttle(None)))
VNODES = 3
NUMBERS = table_of({"id": pa.int64(), "v": pa.int64()}, key=("id",))


class InMemory:
    """A table in memory that is never wrong."""

    def __init__(self) -> None:
        self.table = MemoryUpstream(vnode_count=VNODES, piece_rows=1)
        self.write({key: key for key in range(0, 24, 2)})

    def write(self, changes: Mapping[int, int | None]) -> None:
        self.table.commit(dict(changes))

    def rows(self, epoch: int) -> Rows:
        return self.table.versions[max(known for known in self.table.versions if known <= epoch)]

    def compact(self) -> None:
        self.table.compact()

    def forget(self) -> None:
        self.table.oldest = self.table.newest_epoch()

    def close(self) -> None:
        """Nothing."""


class Kept:
    """A table that we keep: a real log, real runs, real pins."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._kept = WrittenTable(self._folder, NUMBERS, f"memory://{uuid.uuid4()}", merge_runs=3)
        first = {key: key for key in range(0, 24, 2)}
        self._kept.history([{"id": key, "v": value} for key, value in first.items()])
        self._epochs: dict[int, Rows] = {self._kept.newest: first}
        self.table = VersionedUpstream(self._kept.location, NUMBERS.full_name, str(self._kept.root))

    def write(self, changes: Mapping[int, int | None]) -> None:
        now = dict(self._epochs[max(self._epochs)])
        told = []
        for key, value in changes.items():
            if value is None and key in now:
                told.append((DELETE, {"id": key, "v": now.pop(key)}))
            elif value is not None:
                told.append((UPDATE if key in now else INSERT, {"id": key, "v": value}))
                now[key] = value
        self._epochs[self._kept.write(*told)] = now

    def rows(self, epoch: int) -> Rows:
        return self._epochs[max(known for known in self._epochs if known <= epoch)]

    def compact(self) -> None:
        self._kept.fold()
        compact(self._kept.sink.folder(NUMBERS), 2, everything=True, kept_seconds=0)

    def forget(self) -> None:
        self.table.release("machine")
        self.compact()

    def close(self) -> None:
        self._kept.close()
        shutil.rmtree(self._folder)


class UpstreamMachine(RuleBasedStateMachine):
    """Steps in any order."""

    traces: ClassVar[list[list[str]] | None] = None
    kind: ClassVar[type[InMemory] | type[Kept]] = InMemory

    def __init__(self) -> None:
        super().__init__()
        self.upstream: InMemory | Kept = self.kind()
        self.owners = Owners(self.upstream, batch_rows=3)

    @rule(changes=CHANGES)
    def write(self, changes: dict[int, int | None]) -> None:
        self.upstream.write(changes)

    @rule(kind=KINDS, seconds=st.sampled_from((0.1, 1.0, 10.0)))
    def barrier(self, kind: BarrierKind, seconds: float) -> None:
        self.owners.barrier(kind, seconds=seconds)

    @rule(kind=KINDS, mutation=ORDERS)
    def ask(self, kind: BarrierKind, mutation: Mutation) -> None:
        self.owners.barrier(kind, mutation)

    @rule()
    def crash(self) -> None:
        self.owners.crash()

    @rule()
    def compact(self) -> None:
        self.upstream.compact()

    @rule()
    def forget(self) -> None:
        self.upstream.forget()
        self.owners.may_stop = True

    @precondition(lambda self: any(executor.stopped for executor in self.owners.executors.values()))
    @rule()
    def resnapshot(self) -> None:
        self.owners.resnapshot()

    def teardown(self) -> None:
        self.owners.finish()
        self.owners.close()
        self.upstream.close()
        if UpstreamMachine.traces is not None:
            UpstreamMachine.traces.append(self.owners.trace)


class KeptUpstreamMachine(UpstreamMachine):
    """The same over a table that we keep."""

    kind = Kept


def run(machine: Any, examples: int, steps: int, *, random: bool = True) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=not random,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )


def test_the_downstream_of_an_upstream_table_is_what_it_claims_after_each_step(soak: bool) -> None:
    run(UpstreamMachine, 3000 if soak else 60, 60 if soak else 30)


def test_the_downstream_of_a_kept_table_is_what_it_claims_after_each_step(soak: bool) -> None:
    run(KeptUpstreamMachine, 300 if soak else 8, 40 if soak else 20)


def test_the_same_seed_gives_the_same_trace() -> None:
    found = []
    for _ in range(2):
        UpstreamMachine.traces = []
        run(UpstreamMachine, 5, 30, random=False)
        found.append(UpstreamMachine.traces)
    UpstreamMachine.traces = None
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > 20


@pytest.fixture
def soak() -> bool:
    import os

    return os.environ.get("HEADWATER_SOAK") == "1"
