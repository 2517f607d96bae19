"""``headwater run`` on a disk that is really full: it waits, says why, and goes on by itself when there is room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.servers.postgres import Database, PostgresServer
from tests.small_disk import SmallDisk, small_disk
from tests.spark.pipeline.driven import RunningPipeline, are_gone

pytestmark = pytest.mark.crash


class PipelineOnDisk(RunningPipeline):
    """One whose processes have *disk*."""

    def __init__(self, disk: SmallDisk, folder: Path, database: Database) -> None:
        super().__init__(folder, database, '["orders"]')
        self._disk = disk

    def _command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command(*arguments)
        return self._disk.command(*command, folder=self.folder), environment

    def errors(self) -> str:
        """What the status says is wrong."""
        status = self.status()
        parts = [status, status["capture"], *status["sinks"]]
        found = [part.get(key) for part in parts for key in ("error", "last_error", "problem")]
        return " ".join(filter(None, found))

    def mirror(self, table: str) -> list[tuple[Any, ...]]:
        if self._disk.path.name == "lake":  # deltalake would follow the view to where the disk is not
            seen, there = self.folder / "seen", self._disk.view / table
            shutil.rmtree(seen, ignore_errors=True)
            shutil.copytree(there / "_delta_log", seen / "_delta_log")  # first: what it names is there
            shutil.copytree(there, seen, dirs_exist_ok=True, ignore=shutil.ignore_patterns("_delta_log"))
            rows = DeltaTable(str(seen)).to_pyarrow_table(columns=["id", "name"])
            return sorted(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True))
        return super().mirror(table)


@pytest.fixture
def database() -> Iterator[Database]:
    with PostgresServer() as server, server.database() as made:
        made.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
        fill(made, 1, 500)
        yield made


def fill(database: Database, first: int, last: int, size: int = 1) -> None:
    text = f"(SELECT string_agg(md5((n * 7919 + i)::text), '') FROM generate_series(1, {size}) n)"
    database.execute(f"INSERT INTO orders SELECT i, {text} FROM generate_series({first}, {last}) i")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("full", "message"),
    [
        ("headwater", "There is no room for"),  # the store, the journal, the logs, what Spark keeps
        ("lake", "No space left on device"),
    ],
)
def test_a_full_disk_is_waited_out(full: str, message: str, database: Database, tmp_path: Path) -> None:
    with small_disk(tmp_path / full, "64m") as disk:
        pipeline = PipelineOnDisk(disk, tmp_path, database)
        pipeline.start()
        try:
            pipeline.wait_for(lambda: pipeline.table("public.orders")["phase"] == "live")
            disk.fill()
            fill(database, 501, 1000, size=100)
            pipeline.wait_for(lambda: message in pipeline.errors())
            fill(database, 1001, 1100)
            disk.make_room()
            pipeline.wait_until_equal("public.orders")
            pipeline.wait_for(lambda: not pipeline.errors())
            children = pipeline.children()
            assert pipeline.stop() == 0
            assert are_gone(children)
            assert "Traceback" not in (tmp_path / "err").read_text()
        finally:
            pipeline.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_pipeline_can_be_stopped_and_started_on_a_full_disk(database: Database, tmp_path: Path) -> None:
    with small_disk(tmp_path / "headwater", "64m") as disk:
        pipeline = PipelineOnDisk(disk, tmp_path, database)
        pipeline.start()
        try:
            pipeline.wait_for(lambda: pipeline.table("public.orders")["phase"] == "live")
            disk.fill()
            fill(database, 501, 1000, size=100)
            pipeline.wait_for(lambda: "There is no room for" in pipeline.errors())
            status = pipeline.headwater("status")
            assert "There is no room for" in " ".join(status.stdout.split()), status
            children = pipeline.children()
            assert pipeline.stop() == 0
            assert are_gone(children)
            disk.fill()
            pipeline.start()
            code = pipeline.wait()
            said = (tmp_path / "err").read_text()
            assert code == 1, said
            assert "Free some space" in said
            assert "Traceback" not in said
            disk.make_room()
            pipeline.start()
            pipeline.wait_until_equal("public.orders")
        finally:
            pipeline.close()
