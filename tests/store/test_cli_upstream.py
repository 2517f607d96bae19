"""``headwater upstream``: status, metrics and requests of a query over a Delta table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.test_delta_upstream import Lake
from tests.store.test_upstream_planner import Query, rows_of, running
from typer.testing import CliRunner

from headwater.backfill.control import upstream_metrics
from headwater.cli.main import app
from headwater.errors import InputError, NotFoundError


def run(*words: str) -> str:
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def while_it_plans(query: Query, ask: Callable[[], object]) -> None:
    """*ask* while the query goes on in this thread."""
    asked = threading.Thread(target=ask)
    asked.start()
    while asked.is_alive():
        query.batch()
        asked.join(0.05)


def test_a_query_that_stopped_is_shown_measured_and_mended(tmp_path: Path) -> None:
    """M10."""
    lake = Lake(tmp_path / "orders", {1: "a", 2: "b"})
    store = str(tmp_path / "state")
    with pytest.raises(NotFoundError):
        run("upstream", "status", "--store", store)
    with running(lake, tmp_path / "state") as query:
        query.drain()
        while_it_plans(query, lambda: run("pause", "--store", store, "--query", "copy"))
        lake.append({3: "c"})
        assert not query.batch()
        while_it_plans(query, lambda: run("throttle", "100", "--store", store, "--query", "copy"))
        while_it_plans(query, lambda: run("resume", "--store", store, "--query", "copy"))
        query.drain()
        assert query.rows == rows_of(lake)
        lake.overwrite({1: "x"})
        lake.overwrite({1: "y"})
        lake.vacuum()
        assert not query.batch()
        (told,) = json.loads(run("upstream", "status", "--store", store, "--json"))
        assert told["phase"] == "stopped"
        assert told["limit"] == 100
        assert "resnapshot --store" in run("upstream", "status", "--store", store)
        figures = {metric.name: metric.value for metric in upstream_metrics(store)}
        assert figures["upstream_stopped"] == 1.0
        while_it_plans(query, lambda: run("resnapshot", "--store", store, "--query", "copy"))
        query.drain()
        assert query.rows == rows_of(lake)
        query.planner._told = 0.0  # some seconds have passed
        query.batch()
        figures = {metric.name: metric.value for metric in upstream_metrics(store)}
        assert (figures["upstream_stopped"], figures["upstream_lag_versions"]) == (0.0, 0.0)


def test_words_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run("throttle", "fast", "--store", str(tmp_path), "--query", "copy")
    words = ["upstream", "run", "delta:/x", "--store", str(tmp_path), "--key", "id", "--sink", "delta", "--set", "path"]
    with pytest.raises(InputError, match="name=value"):
        run(*words)
