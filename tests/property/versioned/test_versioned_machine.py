"""A kept table under random changes, folds, compactions and pins: at every epoch that it has it is a dict."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.store.sinks.file_sinks import DELETE, INSERT, OLD, UPDATE, table_of
from tests.store.versioned.written import Rows, WrittenTable, applied, rows_at

from headwater.versioned import Pin
from headwater.versioned.compaction import compact

LINES = table_of({"a": pa.int32(), "b": pa.string(), "note": pa.string(), "n": pa.decimal128(10, 2)}, key=("b", "a"))
KEY = ("b", "a")
keys = st.tuples(st.sampled_from(["", "x", "x\x00", "y", "ü🦆"]), st.integers(-3, 3))
notes = st.sampled_from([None, "", "long", "other"])


class KeptMachine(RuleBasedStateMachine):
    """The model has a dict for each epoch."""

    @initialize(history=st.dictionaries(keys, notes, max_size=12))
    def begin(self, history: dict[tuple[str, int], str | None]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.kept = WrittenTable(self.folder, LINES, f"memory://{uuid.uuid4()}", merge_runs=3)
        now = {key: _row(key, note) for key, note in history.items()}
        self.kept.history(list(now.values()))
        self.epochs: dict[int, Rows] = {self.kept.newest: now}
        self.pins: list[Pin] = []
        self.table = self.kept.open()

    @rule(data=st.data(), count=st.integers(0, 8))
    def write(self, data: st.DataObject, count: int) -> None:
        now = dict(self.epochs[max(self.epochs)])
        changes: list[Any] = []
        for _ in range(count):
            key = data.draw(keys)
            note = data.draw(notes)
            if key not in now:
                changes.append((INSERT, _row(key, note)))
                now[key] = _row(key, note)
                continue
            what = data.draw(st.sampled_from(["update", "pair", "untold", "delete", "move", "truncate"]))
            old = now[key]
            if what == "delete":
                changes.append((DELETE, old))
                del now[key]
            elif what == "truncate":
                changes.append("truncate")
                now = {}
            elif what == "move":
                free = next((one for one in ((key[0], at) for at in range(-3, 9)) if one not in now), None)
                assert free is not None
                changes += [(OLD, old), (UPDATE, _row(free, note))]
                del now[key]
                now[free] = _row(free, note)
            elif what == "untold":
                new = {**old, "n": Decimal("7.00")}
                changes.append((UPDATE, {**new, "note": None}, "note"))
                now[key] = new
            else:
                new = _row(key, note, "2.00")
                changes += [*([(OLD, old)] if what == "pair" else []), (UPDATE, new)]
                now[key] = new
        self.epochs[self.kept.write(*changes)] = now

    @rule(back=st.integers(0, 3))
    def fold(self, back: int) -> None:
        upto = sorted(self.epochs)[-1 - min(back, len(self.epochs) - 1)]
        assert self.kept.fold(upto) <= min([upto, *(pin.epoch for pin in self.pins)])

    @rule(everything=st.booleans())
    def compact(self, everything: bool) -> None:
        compact(self.kept.sink.folder(LINES), 2, everything=everything, kept_seconds=0)

    @rule(back=st.integers(0, 4))
    def pin(self, back: int) -> None:
        known = [epoch for epoch in sorted(self.epochs) if epoch >= self.table.base_epoch]
        chosen = known[-1 - min(back, len(known) - 1)]
        self.pins.append(self.table.pin("machine", max(chosen, self.table.base_epoch)))

    @precondition(lambda self: bool(self.pins))
    @rule()
    def release(self) -> None:
        self.pins.pop(0).release()

    @rule(wanted=st.lists(keys, min_size=1, max_size=5, unique=True))
    def look_up(self, wanted: list[tuple[str, int]]) -> None:
        asked = pa.table({"b": [b for b, _ in wanted], "a": pa.array([a for _, a in wanted], pa.int32())})
        now = self.epochs[max(self.epochs)]
        assert self.table.lookup(asked).to_pylist() == [now[key] for key in wanted if key in now]

    @rule(data=st.data())
    def changes_between(self, data: st.DataObject) -> None:
        known = [epoch for epoch in sorted(self.epochs) if epoch >= self.table.base_epoch]
        after = data.draw(st.sampled_from(known))
        upto = data.draw(st.sampled_from([epoch for epoch in known if epoch >= after]))
        cut = data.draw(st.integers(1, 255))
        found = [*self.table.changes(after, upto, (0, cut)), *self.table.changes(after, upto, (cut, 256))]
        assert applied(self.epochs[after], iter(found), KEY) == self.epochs[upto]
        if found:
            self._check_order(found, upto)

    @invariant()
    def it_is_the_model_at_every_epoch(self) -> None:
        if not hasattr(self, "table"):
            return
        base = self.table.base_epoch
        for epoch, rows in self.epochs.items():
            if epoch >= base:
                assert rows_at(self.table, epoch, KEY) == rows
        assert base <= min([max(self.epochs), *(pin.epoch for pin in self.pins)])
        newest = max(self.epochs)
        self._check_order(list(self.table.snapshot(newest, (0, 256))), newest)

    def _check_order(self, batches: list[pa.RecordBatch], epoch: int) -> None:
        places = []
        for batch in batches:
            vnodes = self.table.vnodes(batch, epoch).to_pylist()
            places += list(zip(vnodes, self.table.positions(batch, epoch).to_pylist(), strict=True))
        assert all(one <= other for one, other in pairwise(places))

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            self.table.close()
            self.kept.close()
            shutil.rmtree(self.folder)


def _row(key: tuple[str, int], note: str | None, n: str = "1.00") -> dict[str, Any]:
    return {"a": key[1], "b": key[0], "note": note, "n": Decimal(n)}


EXAMPLES = 200 if os.environ.get("HEADWATER_SOAK") else 12
KeptMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=15)
TestKeptMachine = KeptMachine.TestCase
