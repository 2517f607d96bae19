"""Iceberg tables whose delivery is killed at any durable step, and begun again: they have what one without a kill has.

Killed for good they also leave nothing: whoever starts next removes what was written and never committed.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sampled import SOAK, share
from tests.sampled import hits as hits_of
from tests.store.sinks.file_sinks import ORDERS
from tests.store.sinks.iceberg_tables import open_table, scan

from headwater import failpoints
from headwater.failpoints import registered
from headwater.sinks import iceberg_snapshot, rewrite
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Committed, Mode

from . import deliveries

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["pyiceberg.catalog.sql", "headwater.sinks.iceberg_table"])
MODES = ("mirror", "changes", "history")
_OURS = ("sink.iceberg.", "sink.files.", "sink.staging.")


def deliver(mode: str, path: str, armed: str, generation: int) -> None:
    """Deliver with failpoints armed; chores that are due now and then are due at once."""
    iceberg_snapshot.KEPT_SNAPSHOTS = iceberg_snapshot.EXPIRED_SNAPSHOTS = 2  # type: ignore[misc]
    rewrite.SMALL_FILES = 2  # type: ignore[misc]
    failpoints.arm(armed)
    sink = IcebergSink(path, Mode(mode), file_bytes=64 << 10, retention_hours=0)
    if generation:
        sink.abort(ORDERS, "q", generation)
    for token, table, staged in deliveries.batches(sink, generation):
        sink.commit(table, token, staged)


def count_hits(mode: str, path: str) -> None:
    """Deliver, and write down how often each failpoint was passed."""
    hits: Counter[str] = Counter()
    original = failpoints.hit

    def counted(name: str) -> None:
        hits[name] += 1
        original(name)

    failpoints.hit = counted
    deliver(mode, path, "", 0)
    Path(path, "_hits.json").write_text(json.dumps(hits))


def run(target: Callable[..., None], *arguments: Any) -> int:
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def contents(mode: str, path: Path) -> Any:
    rows = scan(IcebergSink(str(path))).to_pylist()
    if mode == "mirror":
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: (row["status"], str(row["total"])) for row in rows}
    added = ("_change_type",) if mode == "changes" else ("_valid_from", "_valid_to", "_is_current")
    names = ("_commit_version", "id", "status", *added)
    return sorted(tuple(str(row[name]) for name in names) for row in rows)


def orphans(path: Path) -> set[str]:
    """Data files, manifests and metadata that neither the table nor a note names."""
    table_path = path / "public" / "orders"
    there = {str(file) for name in ("data", "metadata") for file in (table_path / name).iterdir()}
    for note in (table_path / "_headwater").glob("*.json"):
        there -= {file.removeprefix("file://") for file in json.loads(note.read_text())}
    with open_table(IcebergSink(str(path))) as table:
        known = {table.metadata_location, *(one.metadata_file for one in table.metadata.metadata_log)}
        for snapshot in table.metadata.snapshots:
            known.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(table.io):
                known.add(manifest.manifest_path)
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
                known |= {entry.data_file.file_path for entry in entries}
    return there - {file.removeprefix("file://") for file in known}


@pytest.mark.parametrize("mode", MODES if SOAK else MODES[:1])
def test_an_iceberg_table_is_killed_at_any_step(mode: str, tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    assert run(count_hits, mode, str(clean)) == 0
    hits: dict[str, int] = json.loads((clean / "_hits.json").read_text())
    expected = contents(mode, clean)
    if mode == "mirror":
        assert expected == deliveries.MIRROR
    if mode != "changes":
        assert set(hits) >= {name for name in registered() if name.startswith(_OURS)}
    assert not orphans(clean)
    for place, (name, count) in enumerate(share(sorted(hits.items()), MODES.index(mode), len(MODES))):
        for at in hits_of(count, place):
            path = tmp_path / f"{name}-{at}"
            assert run(deliver, mode, str(path), f"{name}=kill@{at}", 0) == -signal.SIGKILL, name
            assert run(deliver, mode, str(path), "", 1) == 0, (name, at)
            assert contents(mode, path) == expected, (name, at)
            sink = IcebergSink(str(path), Mode(mode))
            assert sink.committed(deliveries.WIDER, "q", "b1") == Committed(9, 3, 0), (name, at)
            assert not list(path.rglob("*.arrow")), (name, at)
            sink.abort(ORDERS, "q", 2)
            assert not orphans(path), (name, at)
            assert contents(mode, path) == expected, (name, at)


@pytest.mark.soak
def test_killed_again_and_again(tmp_path: Path) -> None:
    for generation, name in enumerate(name for name in sorted(registered()) if name.startswith(_OURS)):
        ended = run(deliver, "mirror", str(tmp_path), f"{name}=kill@2", generation)
        assert ended in (-signal.SIGKILL, 0), name
    assert run(deliver, "mirror", str(tmp_path), "", 99) == 0
    assert contents("mirror", tmp_path) == deliveries.MIRROR
    IcebergSink(str(tmp_path)).abort(ORDERS, "q", 100)
    assert not orphans(tmp_path)
    assert contents("mirror", tmp_path) == deliveries.MIRROR
