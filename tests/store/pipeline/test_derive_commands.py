"""``headwater derive`` and what is asked of derived tables, while no pipeline runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from headwater.cli.main import app
from headwater.derive.state import DerivedState, read_record
from headwater.pipeline.config import configure, load
from headwater.pipeline.derived_query import tables_folder
from headwater.pipeline.errors import ConfigError
from headwater.pipeline.metrics import pipeline_metrics
from headwater.sources.table import SourceColumn, SourceTable
from headwater.versioned.pins import all_pins, put_pin

runner = CliRunner()
EXAMPLE = Path(__file__).parents[3] / "examples" / "derived_tables"
SALES = ["derive", "sales", "shop_views:sales", "--table", "orders", "--by", "day"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pipeline.toml").write_text(
        '[pipeline]\nname = "shop"\n[source]\ndsn = "postgresql://app@127.0.0.1:1/shop"\ntables = ["public.*"]\n'
        '[[sink]]\nkind = "table"\n[[sink]]\nkind = "delta"\npath = "lake"\n'
    )
    shutil.copy(EXAMPLE / "shop_views.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_derived_table_is_written_to_the_file_of_the_pipeline(folder: Path) -> None:
    done = runner.invoke(app, SALES)
    assert done.exit_code == 0, done.stderr
    assert "derived.sales: added to pipeline.toml, delivered to delta." in done.stderr.replace("\n", " ")
    (section,) = load(folder / "pipeline.toml").derive
    assert (section.name, section.tables, section.by, section.sink) == ("sales", ["public.orders"], ["day"], "delta")
    assert callable(section.derivation.load(Path(section.path or "")))
    again = [*SALES[:1], "spending", "shop_views:spending", "--table", "customers", "--table", "orders"]
    both = runner.invoke(app, [*again, "--by", "customers.id", "--by", "orders.customer_id", "--json"])
    assert json.loads(both.stdout) == {"derive": "spending", "table": "derived.spending", "running": False}
    made = load(folder / "pipeline.toml").derive[1].derivation
    assert (made.tables, made.by) == (("public.customers", "public.orders"), (("id",), ("customer_id",)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--sink", "lake"], "Valid are 'delta'"),
        (["--by", "orders.id"], "Write --by column"),
        (["--table", "orders"], "each once"),
    ],
)
def test_what_cannot_be_derived_leaves_the_file_as_it_was(folder: Path, more: list[str], words: str) -> None:
    before = (folder / "pipeline.toml").read_text()
    done = runner.invoke(app, [*SALES, *more])
    assert done.exit_code != 0
    assert words in str(done.exception)
    assert ".new" not in str(done.exception), "what it says is of the file that the person has"
    assert (folder / "pipeline.toml").read_text() == before


def test_a_name_is_given_once_and_kept_tables_are_needed(folder: Path) -> None:
    runner.invoke(app, SALES)
    twice = runner.invoke(app, SALES)
    assert "names something else already" in str(twice.exception)
    source = {"dsn": "postgresql://app@h/d", "tables": ["public.*"]}
    derived = {"name": "sales", "function": "m:f", "tables": ["orders"], "by": ["day"]}
    with pytest.raises(ConfigError, match=r'needs kept tables.*kind = "table"'):
        configure({"source": source, "sink": [{"kind": "delta", "path": "lake"}], "derive": [derived]})
    with pytest.raises(ConfigError, match=r"sink is missing.*Name one of"):
        configure({"source": source, "sink": [{"kind": "table"}], "derive": [derived]})


def test_a_derived_table_is_looked_after_like_a_sink(folder: Path) -> None:
    runner.invoke(app, SALES)
    config = load(folder / "pipeline.toml")
    query = config.query(config.derive[0])
    state = DerivedState(config.state, query)
    table = SourceTable("derived", "sales", (SourceColumn("day", pa.date32(), "date", 1),), ("day",))
    state.put(state.record.begun(table, 5 << 16, "cpython-311:00ff"))
    assert state.record.table("derived", "sales") == table
    state.close()
    pins = tables_folder(config) / "public.orders"
    put_pin(tables_folder(config), pins, "public.orders", "derive", 5 << 16, f"derive-{query}")

    shown = runner.invoke(app, ["status"], env={"COLUMNS": "160"}).stdout
    assert "derived.sales" in shown
    assert "public.orders" in shown
    assert json.loads(runner.invoke(app, ["status", "--json"]).stdout)["derived"][0]["phase"] == "snapshot"
    assert (
        json.loads(runner.invoke(app, ["pause", "--sink", "sales", "--json"]).stdout)[0]["text"]
        == "paused; changes wait in the log"
    )
    listed = json.loads(runner.invoke(app, ["sink", "list", "--json"]).stdout)
    assert [(one["name"], one["kind"]) for one in listed][-1] == ("sales", "derived")
    assert "made anew, not set back" in str(runner.invoke(app, ["sink", "rewind", "sales"]).exception)
    runner.invoke(app, ["sink", "drop", "sales", "--yes"])
    assert read_record(config.state, query) is None
    assert not list(pins.rglob("*.json")), "nothing is held for it any more"
    runner.invoke(app, ["resume", "--sink", "sales"])


def test_pins_are_listed_with_their_owners_and_released_by_them(folder: Path) -> None:
    config = load(folder / "pipeline.toml")
    root = tables_folder(config)
    for table in ("public.orders", "public.customers"):
        put_pin(root, root / table, table, "derive shop-sales", 5 << 16, "derive-shop-sales")
    put_pin(root, root / "public.orders", "public.orders", "a report", 7 << 16)
    shown = runner.invoke(app, ["pins", "list"], env={"COLUMNS": "200"}).stdout
    assert "derive shop-sales" in shown
    assert "a report" in shown
    told = json.loads(runner.invoke(app, ["pins", "list", "--json"]).stdout)
    assert [(one["table"], one["owner"], one["epoch"], one["lasting"], one["is_lost"]) for one in told] == [
        ("public.customers", "derive shop-sales", 5 << 16, True, False),
        ("public.orders", "derive shop-sales", 5 << 16, True, False),
        ("public.orders", "a report", 7 << 16, False, False),
    ]
    refused = runner.invoke(app, ["pins", "release", "derive shop-sales"], input="n\n")
    assert refused.exit_code == 1
    assert "may still read it" in refused.stderr
    assert len(all_pins(root)) == 3
    done = runner.invoke(app, ["pins", "release", "derive shop-sales", "--yes"])
    assert "public.orders: no longer held at epoch 327680" in done.stderr.replace("\n", " ")
    (reader,) = all_pins(root)
    by_folder = ["pins", "release", reader.id, "--yes", "--json", "--tables", str(root)]
    assert [one["owner"] for one in json.loads(runner.invoke(app, by_folder).stdout)] == ["a report"]
    nothing = runner.invoke(app, ["pins", "release", "nobody"])
    assert "Nothing is pinned by 'nobody'" in str(nothing.exception)


def test_figures_of_a_derived_table_are_served(folder: Path) -> None:
    runner.invoke(app, SALES)
    config = load(folder / "pipeline.toml")
    state = DerivedState(config.state, config.query(config.derive[0]))
    table = SourceTable("derived", "sales", (SourceColumn("day", pa.date32(), "date", 1),), ("day",))
    state.put(replace(state.record.begun(table, 5 << 16, ""), rows=12, seconds=1.5))
    state.close()
    found = {one.name: one.value for one in pipeline_metrics(config) if ("derived", "sales") in one.labels}
    assert found["derived_up"] == 0.0
    assert (found["derived_rows_total"], found["derived_batch_seconds"]) == (12.0, 1.5)
    assert {"derived_lag_rows", "derived_restarts_total", "derived_state"} <= found.keys()
    assert "derived_lag_seconds" not in found, "nothing runs: it is unknown"


def test_the_example_is_a_pipeline_whose_functions_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", "postgresql://app@127.0.0.1:1/shop")
    config = load(EXAMPLE / "pipeline.toml")
    assert [one.name for one in config.derive] == ["open_orders", "sales", "spending"]
    for one in config.derive:
        assert callable(one.derivation.load(Path(one.path or "")))
