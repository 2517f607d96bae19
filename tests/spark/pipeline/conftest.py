"""Pipelines in the session that all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.shops import Shop
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import SessionPipeline

StartPipeline = Callable[..., SessionPipeline]


@pytest.fixture
def start_pipeline(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartPipeline]:
    """Starts the pipeline of the test; it is stopped at the end."""
    made: list[SessionPipeline] = []

    def start(database: Database | Shop, tables: str, more: str = "") -> SessionPipeline:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("SHOP_DSN", database.dsn)
        one = SessionPipeline(tmp_path, database, tables, more, spark)
        made.append(one)
        one.start()
        return one

    yield start
    for one in made:
        one.close()
