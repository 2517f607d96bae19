"""A delivery into a database that is killed at any step and begun again leaves what one without a kill leaves.

Each kind of database has a test class of its own with these tests.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.sampled import hits as hits_of
from tests.sampled import share

from headwater.failpoints import registered
from headwater.sinks.sink import Committed

from . import deliveries, sql_deliveries

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["headwater.sinks.postgres_target", "headwater.sinks.mysql_target", "tests.crash.sinks.sql_deliveries"]
)

Database = Callable[[], AbstractContextManager[str]]
"""A fresh database for a while: its address."""


def run(target: Callable[..., None], *arguments: Any) -> int:
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def contents(kind: str, dsn: str, mode: str) -> Any:
    sink = sql_deliveries.sink_of(kind, dsn, mode)
    more = {"mirror": [], "changes": ["_change_type"], "history": ["_valid_from", "_valid_to", "_is_current"]}[mode]
    more += ["_commit_version"] if mode != "mirror" else []
    names = ["id", "status", "total", *more]
    rows = [tuple(row.values()) for batch in sink.shown(deliveries.WIDER, names) for row in batch.to_pylist()]
    assert sink.committed(deliveries.WIDER, "q", "b1") == Committed(9, 3, 0)
    with sink._target() as target:  # type: ignore[attr-defined]
        assert not [name for name in target.relations() if name.startswith("s") and "_" in name]
    return sorted(rows, key=repr)


class KilledScenarios:
    """Needs the fixture ``database``."""

    kind: ClassVar[str]

    @pytest.mark.parametrize("mode", ["mirror", pytest.param("history", marks=pytest.mark.soak)])
    def test_killed_at_any_step(self, mode: str, database: Database, tmp_path: Path) -> None:
        with database() as dsn:
            assert run(sql_deliveries.count_hits, self.kind, dsn, mode, str(tmp_path / "hits")) == 0
            expected = contents(self.kind, dsn, mode)
        hits: dict[str, int] = json.loads((tmp_path / "hits").read_text())
        assert set(hits) >= {name for name in registered() if name.startswith(("sink.sql.", f"sink.{self.kind}."))}
        if mode == "mirror":
            assert {row[0]: (row[1], str(row[2])) for row in expected} == deliveries.MIRROR
        for place, (name, count) in enumerate(share(sorted(hits.items()), int(mode == "mirror"), 2)):
            for at in hits_of(count, place) if mode == "mirror" else [(count + 1) // 2]:
                with database() as dsn:
                    armed = f"{name}=kill@{at}"
                    assert run(sql_deliveries.child, self.kind, dsn, mode, armed, 1) == -signal.SIGKILL, (name, at)
                    assert run(sql_deliveries.child, self.kind, dsn, mode, "", 2) == 0, (name, at)
                    assert contents(self.kind, dsn, mode) == expected, (name, at)

    @pytest.mark.soak
    def test_killed_again_and_again(self, database: Database) -> None:
        names = [name for name in sorted(registered()) if name.startswith(("sink.sql.", f"sink.{self.kind}."))]
        with database() as dsn:
            for generation, name in enumerate(names, 1):
                ended = run(sql_deliveries.child, self.kind, dsn, "mirror", f"{name}=kill@2", generation)
                assert ended in (-signal.SIGKILL, 0), name
            assert run(sql_deliveries.child, self.kind, dsn, "mirror", "", len(names) + 1) == 0
            found = contents(self.kind, dsn, "mirror")
        assert {row[0]: (row[1], str(row[2])) for row in found} == deliveries.MIRROR

    def test_two_processes_that_deliver_the_same_batches_at_once(self, database: Database) -> None:
        with database() as dsn:
            runs = [
                _PROCESSES.Process(target=sql_deliveries.child, args=(self.kind, dsn, "changes", "", 1))
                for _ in range(2)
            ]
            for one in runs:
                one.start()
            for one in runs:
                one.join(60)
            assert any(one.exitcode == 0 for one in runs)
            if any(one.exitcode for one in runs):  # one found that the other had been faster
                assert run(sql_deliveries.child, self.kind, dsn, "changes", "", 1) == 0
            found = contents(self.kind, dsn, "changes")
        with database() as dsn:
            assert run(sql_deliveries.child, self.kind, dsn, "changes", "", 1) == 0
            assert contents(self.kind, dsn, "changes") == found
