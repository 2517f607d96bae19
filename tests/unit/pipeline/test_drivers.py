"""Drivers of databases are imported before a pipeline has threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from headwater import Pipeline
from headwater.pipeline.supervision import Supervisor

modules = []
Supervisor.run = lambda self, begun: (modules.extend(sys.modules), begun.set())
pipeline = Pipeline({source!r}, ["t"], store={store!r}).sink({kind!r}, **{options!r})
pipeline.start().wait()
assert {driver!r} in modules, "not imported"
"""


@pytest.mark.parametrize(
    ("source", "kind", "options", "driver"),
    [
        ("postgresql://localhost/shop", "parquet", {"path": "lake"}, "psycopg.pq"),
        ("mysql://localhost/shop", "postgres", {"dsn": "postgresql://localhost/target"}, "psycopg.pq"),
        ("postgresql://localhost/shop", "mysql", {"dsn": "mysql://localhost/target"}, "pymysql.connections"),
    ],
)
def test_the_drivers_of_source_and_sinks_are_there_when_the_threads_of_a_pipeline_start(
    source: str, kind: str, options: dict[str, str], driver: str, tmp_path: Path
) -> None:
    script = SCRIPT.format(source=source, kind=kind, options=options, driver=driver, store=str(tmp_path / "store"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
