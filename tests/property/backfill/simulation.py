"""A query over a fake database: plans, reads and commits as the real one does, and may crash at each durable step.

What is durable: the query's state (a real state store), the offsets and commits that Spark keeps, and the sink. All
else is lost in a crash, the exported snapshot too. Everything follows from the steps that are given: no clock, no
chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.unit.backfill.fake_database import FakeDatabase, FakeOrder, FakeSnapshot, Key, Row, is_in

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions
from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.cdc.mark import apply_filter
from headwater.backfill.cdc.parallel import open_backfill
from headwater.backfill.cdc.state import BackfillTables, Renewal
from headwater.backfill.progress import Phase
from headwater.backfill.units import Rule, covered
from headwater.sources.splits import KeyRange, SplitKind
from headwater.state import Catalog, WriteBatch, open_writer
from headwater.stream import Barrier, BarrierKind, Epoch, EpochPair, Mutation, Op

CRASHES = ("before_save", "after_save", "after_logged", "before_commit", "after_commit")
"""Where a batch may crash: in the order of its steps."""

_stores = count()


class Crash(Exception):
    """The process that plans is gone."""


@dataclass
class Sink:
    """Has each batch once, if it *knows* what it has; else as often as it is told.

    :ivar told: every change: key, position, op; a row of history has the position ``None``.
    """

    knows: bool = True
    mirror: dict[Key, Row] = field(default_factory=dict)
    told: list[tuple[Key, bytes | None, int]] = field(default_factory=list)
    epoch: int = 0
    plan: int = 0
    attempt: int = 0


@dataclass(slots=True)
class Plan:
    """What is durable of the newest plan beside the executor's state."""

    number: int = 0
    attempt: int = 0


class Query:
    """One query of one table."""

    def __init__(self, database: FakeDatabase, options: BackfillOptions, *, knows: bool = True) -> None:
        self.database = database
        self.external = ExternalStorageTable(database.table, database)
        self.options = options
        self.sink = Sink(knows)
        self.logged: list[tuple[int, int]] = [(0, 0)]
        self.committed = 0
        self.trace: list[str] = []
        self._store = open_writer(f"memory://backfill-simulation-{next(_stores)}")
        self._epoch = 0
        self._plan = Plan()
        self._held: tuple[int, FakeSnapshot] | None = None
        self._now = 0.0
        self._barriers = 0
        self._start_process()

    # -- processes -------------------------------------------------------------------------------------------------

    def _start_process(self) -> None:
        with self._store.snapshot() as view:
            tables = BackfillTables(Catalog.load(view), WriteBatch())
            self.executor: BackfillExecutor = open_backfill(self.external, tables, view, self.options)

    def crash(self, why: str) -> None:
        """Everything but the durable is lost; the query starts again."""
        self.trace.append(f"crash {why}")
        self.let_go()
        self._start_process()

    def let_go(self) -> None:
        """The batch is over: its snapshot ends."""
        if self._held is not None:
            self._held[1].close()
            self._held = None

    def _save(self) -> None:
        batch = WriteBatch()
        self.executor.state.save(batch)
        self._epoch += 1
        self._store.seal(Epoch.from_ms(self._epoch), batch)

    def tell(self, mutation: Mutation) -> None:
        """Ask something of the executor, durably."""
        self._barriers += 1
        pair = EpochPair(curr=Epoch.from_ms(self._barriers + 1), prev=Epoch.from_ms(self._barriers))
        barrier = Barrier(pair, BarrierKind.CHECKPOINT, mutation)
        self.executor.on_barrier(barrier)
        self.trace.append(f"told {mutation}")
        self._save()

    def renew(self, renewal: Renewal) -> None:
        self.executor.renew(renewal)
        self.trace.append(f"renewal {renewal.id}")
        self._save()

    # -- batches ---------------------------------------------------------------------------------------------------

    @property
    def is_delivered(self) -> bool:
        return self.committed == len(self.logged) - 1

    def step(
        self,
        *,
        budget: int,
        upto: int | None = None,
        seconds: float = 1.0,
        crash: str | None = None,
        settles: bool = True,
    ) -> None:
        """One batch, or the one again that was not committed.

        :param crash: where it ends. :param settles: whether the place in the log where it begins is known.
        """
        self._now += seconds
        try:
            if self.is_delivered and not self._advance(budget, upto, crash, settles):
                return
            self._run(crash)
        except Crash:
            self.crash(crash or "")

    def _advance(self, budget: int, upto: int | None, crash: str | None, settles: bool) -> bool:
        database, executor = self.database, self.executor
        start_epoch, start_plan = self.logged[-1]
        self.let_go()
        if self._plan.number > start_plan:
            self._plan = Plan(start_plan)
        executor.roll_back(start_plan, start_epoch)
        if settles:
            executor.settle(database.place(start_epoch), start_epoch)
        end = database.newest if upto is None else max(start_epoch, min(upto, database.newest))
        truncated = database.truncated(start_epoch, end)
        if truncated is not None:
            executor.truncate(truncated[0])
        plan = start_plan
        if executor.wants(self._now) > 0:
            snapshot = database.export()
            shown = all(snapshot.mark.has(t.xid) for t in database.commits[: database.epochs[end][0]])
            handed = executor.hand_out(start_plan + 1, snapshot, budget) if shown else []
            if handed:
                plan += 1
                self._held = (plan, snapshot)
                told = [(part.range.to_json(), part.rows) for part in handed]
                self.trace.append(f"plan {plan} in {snapshot.mark} hands out {told}")
                assert handed == executor.handed_out(plan)
            else:
                snapshot.close()
        self._reach("before_save", crash)
        if plan > start_plan:
            self._plan = Plan(plan)
        self._save()
        self._reach("after_save", crash)
        if (end, plan) == self.logged[-1]:
            return False
        self.logged.append((end, plan))
        self.trace.append(f"logged epoch {end} plan {plan}")
        self._reach("after_logged", crash)
        return True

    def _reach(self, place: str, crash: str | None) -> None:
        if place == crash:
            raise Crash(place)

    def _run(self, crash: str | None) -> None:
        (after, start_plan), (epoch, plan) = self.logged[-2:]
        has = self.sink.knows and (self.sink.epoch, self.sink.plan) == (epoch, plan)
        if not has:
            self._deliver(after, epoch, start_plan, plan, crash)
        self._reach("after_commit", crash)
        self.committed = len(self.logged) - 1
        if self.sink.knows:
            self._check(epoch, plan)

    def _deliver(self, after: int, epoch: int, start_plan: int, plan: int, crash: str | None) -> None:
        database, executor = self.database, self.executor
        history: list[tuple[KeyRange, list[tuple[Key, dict[str, int]]]]] = []
        if plan > start_plan:
            snapshot = self._snapshot_of(plan)
            for part in covered([handed.range for handed in executor.handed_out(plan)]):
                history.append((part, self._read(part, snapshot)))
        kept, truncated = executor.filter(plan), database.truncated(after, epoch)
        changes = database.changes(after, epoch)
        if kept is not None:
            changes = apply_filter(changes, kept, FakeOrder(), database.table.key_columns, truncated)
        self._reach("before_commit", crash)
        sink = self.sink
        if truncated is not None:
            sink.mirror.clear()
        for row in changes.to_pylist():
            key = tuple(row[name] for name in database.table.key_columns)
            if truncated is not None and (row["_epoch"], row["_seq"]) < truncated:
                continue
            sink.told.append((key, row["_position"], row["_op"]))
            if row["_op"] in (Op.INSERT, Op.UPDATE_INSERT):
                sink.mirror[key] = (row["a"], row["b"])
            elif row["_op"] == Op.DELETE:
                sink.mirror.pop(key, None)
        renewal = executor.renewal
        for part, rows in history:
            if renewal is not None and renewal.columns is None and executor.kind is SplitKind.KEY:
                sink.mirror = {key: row for key, row in sink.mirror.items() if not is_in(part, key)}
            for key, values in rows:
                if renewal is not None and renewal.columns is not None:
                    if key in sink.mirror:
                        old = dict(zip("ab", sink.mirror[key], strict=True))
                        sink.mirror[key] = ({**old, **values}["a"], {**old, **values}["b"])
                else:
                    sink.mirror[key] = (values["a"], values["b"])
                    if renewal is None:
                        sink.told.append((key, None, Op.INSERT))
        sink.epoch, sink.plan, sink.attempt = epoch, plan, self._plan.attempt
        self.trace.append(f"sink has epoch {epoch} plan {plan}")

    def _snapshot_of(self, plan: int) -> FakeSnapshot:
        if self._held is None or self._held[0] != plan:
            self.let_go()
            snapshot = self.database.export()
            self.executor.retake(plan, snapshot.mark, exact=self.sink.knows)
            self._plan.attempt += 1
            self.trace.append(f"plan {plan} again in {snapshot.mark}")
            self._held = (plan, snapshot)
            self._save()
        return self._held[1]

    def _read(self, part: KeyRange, snapshot: FakeSnapshot) -> list[tuple[Key, dict[str, int]]]:
        table, renewal = self.database.table, self.executor.renewal
        columns = None if renewal is None or renewal.columns is None else [str(one) for one in renewal.columns]
        found: list[tuple[Key, dict[str, int]]] = []
        for batch in self.database.read(table, self.executor.kind, part, snapshot.name, columns=columns):
            for row in batch.to_pylist():
                found.append((tuple(row.pop(name) for name in table.key_columns), row))
        return found

    # -- what must hold --------------------------------------------------------------------------------------------

    def _check(self, epoch: int, plan: int) -> None:
        """After each batch the mirror is what the filter says: each key as its own snapshot and the log have it."""
        executor, database = self.executor, self.database
        after = self.logged[-2][0]
        kept = executor.filter(plan)
        at_epoch = database.rows_at(epoch)
        renewal = executor.renewal
        if kept is None or database.truncated(after, epoch) is not None:
            assert self.sink.mirror == at_epoch, "all keys are as the log has them"
            return
        is_heap = executor.kind is SplitKind.HEAP
        if is_heap and not (self.options.whole and renewal is None):
            return  # it is the source's table in the end
        if renewal is not None and renewal.columns is not None:
            return
        states = [database.state(mark=mark, upto=database.epochs[epoch][0])[0] for mark in kept.marks]  # type: ignore[arg-type]
        keys = {*self.sink.mirror, *at_epoch, *(key for state in states for key in state)}
        for key in sorted(keys):
            run = next(run for run in kept.runs if run.end is None or is_in(KeyRange(None, run.end), key))
            expected: Any = None
            if run.rule is Rule.EMIT:
                expected = at_epoch.get(key)
            elif run.rule is Rule.SINCE:
                assert run.mark is not None
                expected = states[run.mark].get(key)
            assert self.sink.mirror.get(key) == expected, f"{key} in {run}"

    def check_told_once(self) -> None:
        """No change was told twice, and no row of history."""
        told = [(key, position) for key, position, op in self.sink.told if op != Op.UPDATE_DELETE]
        assert len(told) == len(set(told)), "a change was told twice"

    def drain(self, limit: int = 400) -> None:
        """Run until everything is read and delivered."""
        for _ in range(limit):
            if self.executor.phase is Phase.DONE and self.is_delivered and self.logged[-1][0] == self.database.newest:
                break
            if self.is_delivered and self.logged[-1][0] == self.database.newest:
                self.database.seal()
            self.step(budget=10, seconds=100.0)
        else:
            raise AssertionError(f"not done after {limit} batches: {self.executor.progress()}")
        assert self.sink.mirror == self.database.rows_at(self.logged[-1][0])
