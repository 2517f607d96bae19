"""Random writes, barriers of all kinds, crashes, rescales, pauses, throttles and compactions over an upstream table:
after each step the downstream has exactly the rows of the epochs that it claims, each row once per vnode and epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.property.backfill.upstream_machine import NAMES, Owners
from tests.unit.backfill.upstream_model import MemoryUpstream, Rows

from headwater.stream import BarrierKind, Mutation, Pause, Resume, Throttle

KEYS = st.integers(0, 24)
CHANGES = st.dictionaries(KEYS, st.one_of(st.none(), st.integers(0, 9)), max_size=20)
KINDS = st.sampled_from((BarrierKind.BARRIER, BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT))
ORDERS = st.sampled_from((Pause(), Resume(), Resume(), Throttle(0), Throttle(2), Throttle(None), Throttle(None)))
VNODES = 3


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


class UpstreamMachine(RuleBasedStateMachine):
    """Steps in any order."""

    traces: ClassVar[list[list[str]] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.upstream = InMemory()
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

    @rule(owners=st.lists(st.integers(0, len(NAMES) - 1), min_size=VNODES, max_size=VNODES))
    def rescale(self, owners: list[int]) -> None:
        self.owners.rescale(owners)

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
        if UpstreamMachine.traces is not None:
            UpstreamMachine.traces.append(self.owners.trace)


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
