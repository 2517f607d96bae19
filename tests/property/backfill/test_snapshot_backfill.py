"""Whatever happens, a downstream of a versioned table has what the table had at the epoch that it claims.

Writes, barriers of all kinds, phases, crashes in each step, another number of tasks, pause, throttle and compaction in
any order. The sink takes each row strictly once. The same seed gives the same trace.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sampled import SOAK
from tests.unit.backfill.snapshot.memory_table import MemoryTable
from tests.unit.backfill.snapshot.runner import Downstream

from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.stream import BarrierKind, Pause, Resume, Throttle

pytestmark = pytest.mark.property

ACTIONS = (
    "write",
    "write",
    "batch",
    "batch",
    "batch",
    "plan",
    "deliver",
    "crash",
    "barrier",
    "pause",
    "throttle",
    "rescale",
    "compact",
)


def _play(seed: int, steps: int) -> Downstream:
    """One life, all of it decided by *seed*."""
    chance = random.Random(seed)
    table = MemoryTable(chance.choice((1, 2, 8)), batch_rows=chance.choice((1, 3, 10)))
    epochs = iter(range(1, 10_000))
    table.commit(next(epochs), {chance.randrange(60): chance.randrange(100) for _ in range(chance.randrange(60))})
    made = Downstream(table, budget=chance.choice((1, 4, 50)), epochs_per_batch=chance.choice((1, 3)))
    for _ in range(steps):
        made.now += chance.random()
        match chance.choice(ACTIONS):
            case "write":
                upserts = {chance.randrange(60): chance.randrange(100) for _ in range(chance.randrange(5))}
                deletes = tuple(chance.randrange(60) for _ in range(chance.randrange(3)))
                table.commit(next(epochs), upserts, tuple(key for key in deletes if key not in upserts))
            case "batch":
                made.batch()
            case "plan" if made.planned is None:
                made.plan()
            case "deliver" if made.planned is not None:
                made.deliver()  # and its offset may be lost in a crash, or the batch come once more
            case "crash":
                made.crash(kept=chance.random() < 0.5)
            case "barrier":
                made.barrier(kind=chance.choice(list(BarrierKind)))
            case "pause":
                made.barrier(chance.choice((Pause(), Resume(), Resume())))
            case "throttle":
                made.barrier(Throttle(chance.choice((0, 3, 100, None, None))))
            case "rescale":
                made.tasks = chance.choice((1, 2, 3, 5))
            case "compact":
                table.compact()
        if made.sink.offset[0] >= table.base_epoch:
            made.check()
    made.barrier(Resume())
    made.barrier(Throttle(None))
    made.run()
    assert made.phase is SnapshotPhase.LIVE
    assert made.sink.rows == table.rows(table.newest_epoch)
    return made


@settings(max_examples=1500 if SOAK else 60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 40), steps=st.integers(5, 60))
def test_the_downstream_is_the_upstream_at_every_epoch_that_it_claims(seed: int, steps: int) -> None:
    _play(seed, steps)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    assert _play(seed, 40).sink.trace == _play(seed, 40).sink.trace
