"""A delivery that is killed at any durable step and begun again leaves exactly what one without a kill leaves."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headwater.failpoints import registered
from headwater.sinks import open_sink
from headwater.sinks.parquet import read
from headwater.sinks.sink import Committed, Sink

from . import deliveries

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["deltalake.exceptions", "pyarrow.parquet", "tests.crash.sinks.deliveries"])

KINDS = [("delta", "mirror"), ("delta", "changes"), ("parquet", "changes")]
OF_KIND = {"delta": ("sink.delta.", "sink.files.", "sink.staging."), "parquet": ("sink.parquet.", "sink.files.")}


def run(target: Callable[..., None], *arguments: Any) -> int:
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def contents(kind: str, mode: str, path: Path) -> Any:
    table = path / "public.orders"
    if mode == "mirror":
        rows = DeltaTable(table).to_pyarrow_table().to_pylist()
        found = {row["id"]: (row["status"], str(row["total"])) for row in rows}
        assert len(found) == len(rows)
        return found
    rows = (read(table) if kind == "parquet" else DeltaTable(table).to_pyarrow_table()).to_pylist()
    return sorted((row["_commit_version"], row["id"], row["_change_type"], row["status"] or "") for row in rows)


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_killed_at_any_step(kind: str, mode: str, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    assert run(deliveries.count_hits, kind, mode, str(clean)) == 0
    hits: dict[str, int] = json.loads((clean / "_hits.json").read_text())
    expected = contents(kind, mode, clean)
    if mode == "mirror":
        assert expected == deliveries.MIRROR
        assert set(hits) >= {name for name in registered() if name.startswith(OF_KIND[kind])}
    if kind == "parquet":
        assert set(hits) >= {name for name in registered() if name.startswith(OF_KIND[kind])}
    for name, count in sorted(hits.items()):
        for at in sorted({1, count}):
            path = tmp_path / f"{name}-{at}"
            assert run(deliveries.child, kind, mode, str(path), f"{name}=kill@{at}", 0) == -signal.SIGKILL, name
            assert run(deliveries.child, kind, mode, str(path), "", 0) == 0, (name, at)
            assert contents(kind, mode, path) == expected, (name, at)
            sink = open_sink(kind, path=str(path), mode=mode)
            assert committed(sink) == Committed(9, 3, 0), (name, at)
            assert not list(path.rglob("*.arrow")), (name, at)
            assert not list(path.rglob("_staging/**/*.parquet")), (name, at)


def committed(sink: Sink) -> Committed:
    return sink.committed(deliveries.WIDER, "q", "b1")


@pytest.mark.parametrize("epoch", sorted(deliveries.STEPS))
def test_the_batches_do_what_they_say(epoch: int, tmp_path: Path) -> None:
    assert run(deliveries.child, "delta", "mirror", str(tmp_path), "", epoch) == 0
    found = contents("delta", "mirror", tmp_path)
    assert {key: status for key, (status, _) in found.items()} == deliveries.STEPS[epoch]


def test_killed_again_and_again(tmp_path: Path) -> None:
    hits = [name for name in sorted(registered()) if name.startswith(OF_KIND["delta"])]
    for name in hits:
        ended = run(deliveries.child, "delta", "mirror", str(tmp_path), f"{name}=kill@2", 0)
        assert ended in (-signal.SIGKILL, 0), name
    assert run(deliveries.child, "delta", "mirror", str(tmp_path), "", 0) == 0
    assert contents("delta", "mirror", tmp_path) == deliveries.MIRROR
