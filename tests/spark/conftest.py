"""One Spark session for all tests: starting it costs more than any of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.db.conftest import newest_postgres, postgres_servers, start_postgres

from headwater.spark.session import session

__all__ = ["newest_postgres", "postgres_servers", "start_postgres"]

Stop = Callable[[], None]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))  # workers import the test modules
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    made = session(
        "local[2]",
        app_name="headwater-tests",
        checkpoints=tmp_path_factory.mktemp("checkpoints"),
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        },
    )
    yield made
    made.stop()
