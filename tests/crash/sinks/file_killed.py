"""A delivery into files that is killed at any durable step and begun again leaves what one without a kill leaves."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from tests.sampled import hits as hits_of
from tests.sampled import share

from headwater.failpoints import registered
from headwater.sinks.open import open_sink
from headwater.sinks.parquet import read
from headwater.sinks.sink import Committed

from . import deliveries

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["deltalake.exceptions", "pyarrow.parquet", "tests.crash.sinks.deliveries"])

OF_KIND = {"delta": ("sink.delta.", "sink.files.", "sink.staging."), "parquet": ("sink.parquet.", "sink.files.")}


def run(target: Callable[..., None], *arguments: Any) -> int:
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def contents(kind: str, mode: str, path: Path) -> Any:
    table = path / "public.orders"
    if kind == "parquet":
        found_rows = _changes(read(table).to_pylist())
        assert _by_directory(table) == found_rows
        return found_rows
    rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    if mode == "mirror":
        found = {row["id"]: (row["status"], str(row["total"])) for row in rows}
        assert len(found) == len(rows)
        return found
    if mode == "history":
        assert {row["id"]: row["status"] for row in rows if row["_is_current"]} == deliveries.CURRENT
        return sorted(
            (row["id"], row["_commit_version"], row["status"] or "", str(row["_valid_from"]), str(row["_valid_to"]))
            for row in rows
        )
    return _changes(rows)


def _changes(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted((row["_commit_version"], row["id"], row["_change_type"], row["status"] or "") for row in rows)


def _by_directory(table: Path) -> list[Any]:
    """The changes that those see who list the directory."""
    return _changes([row for path in table.glob("*.parquet") for row in pq.read_table(path).to_pylist()])


def killed_at_any_step(kind: str, mode: str, folder: Path) -> None:
    """Kill the delivery when it passes a failpoint, and begin it again: each of them in one of the modes."""
    clean = folder / "clean"
    assert run(deliveries.count_hits, kind, mode, str(clean)) == 0
    hits: dict[str, int] = json.loads((clean / "_hits.json").read_text())
    expected = contents(kind, mode, clean)
    if mode == "mirror":
        assert expected == deliveries.MIRROR
    if mode != "changes" or kind == "parquet":
        assert set(hits) >= {name for name in registered() if name.startswith(OF_KIND[kind])}
    modes = {"delta": ("mirror", "changes", "history"), "parquet": ("changes",)}[kind]
    for place, (name, count) in enumerate(share(sorted(hits.items()), modes.index(mode), len(modes))):
        for at in hits_of(count, place):
            path = folder / f"{name}-{at}"
            assert run(deliveries.child, kind, mode, str(path), f"{name}=kill@{at}", 0) == -signal.SIGKILL, name
            if kind == "parquet":
                _none_is_there_twice(path / "public.orders", expected)
            assert run(deliveries.child, kind, mode, str(path), "", 0) == 0, (name, at)
            assert contents(kind, mode, path) == expected, (name, at)
            sink = open_sink(kind, path=str(path), mode=mode)
            assert sink.committed(deliveries.WIDER, "q", "b1") == Committed(9, 3, 0), (name, at)
            assert not list(path.rglob("*.arrow")), (name, at)
            assert not list(path.rglob("_staging/**/*.parquet")), (name, at)


def _none_is_there_twice(table: Path, expected: list[Any]) -> None:
    """After the kill, before anybody mends it: neither by the manifests nor by the directory."""
    if not table.exists():
        return
    told = _changes(read(table).to_pylist())
    assert Counter(told) <= Counter(expected)
    assert Counter(_by_directory(table)) <= Counter(told)
