"""The command as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater import __version__
from headwater.cli.main import app
from headwater.state import Catalog, Field, FieldType, TableSchema, WriteBatch, open_writer
from headwater.stream import Epoch

runner = CliRunner()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    schema = TableSchema("splits", 1, (Field("number", FieldType.INT),), (Field("done", FieldType.BOOL),))
    with open_writer(tmp_path / "store") as made:
        batch = WriteBatch()
        with made.snapshot() as view:
            table = Catalog.load(view).open_or_create(schema, batch)
        for number in range(3):
            table.put(batch, 0, (number,), (True,))
        made.seal(Epoch.from_unix_ms(1_790_000_000_000), batch)
        made.pin("left behind")
    return tmp_path / "store"


def headwater(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from headwater.cli.main import run; run()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_version_and_help_tell_a_newcomer_what_there_is() -> None:
    assert runner.invoke(app, ["--version"]).stdout == f"headwater {__version__}\n"
    shown = runner.invoke(app, ["--help"]).stdout
    for words in ("demo", "state", "journal", "Start here", "Look inside", "exactly once"):
        assert words in shown


def test_state_status_shows_epoch_writer_and_pins(store: Path) -> None:
    shown = runner.invoke(app, ["state", "status", str(store)], env={"COLUMNS": "200"}).stdout
    for words in ("embedded", "2026-09-21", "left behind", "last writer"):
        assert words in shown
    figures = json.loads(runner.invoke(app, ["state", "status", str(store), "--json"]).stdout)
    assert figures["committed_epoch"] == Epoch.from_unix_ms(1_790_000_000_000)
    assert figures["keys"] == 4
    assert figures["pins"][0]["name"] == "left behind"


def test_state_tables_lists_schemas_and_rows(store: Path) -> None:
    tables = json.loads(runner.invoke(app, ["state", "tables", str(store), "--json"]).stdout)
    assert tables == [
        {"name": "splits", "version": 1, "key": [["number", "int"]], "value": [["done", "bool"]], "rows": 3}
    ]
    assert "number int" in runner.invoke(app, ["state", "tables", str(store)], env={"COLUMNS": "200"}).stdout


def test_state_unpin_and_compact(store: Path) -> None:
    assert "Released pin" in runner.invoke(app, ["state", "unpin", str(store), "left behind"]).stdout
    assert json.loads(runner.invoke(app, ["state", "status", str(store), "--json"]).stdout)["pins"] == []
    done = json.loads(runner.invoke(app, ["state", "compact", str(store), "--json"]).stdout)
    assert 0 < done["bytes_after"] <= done["bytes_before"]


def test_errors_are_one_line_with_the_next_step_and_no_traceback(tmp_path: Path, store: Path) -> None:
    missing = headwater("state", "status", str(tmp_path / "nowhere"))
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: There is no state store in")
    assert "Traceback" not in missing.stderr
    wrong = headwater("state", "status", "redis://user:secret@host")
    assert wrong.returncode == 2
    assert "secret" not in wrong.stderr
    assert headwater("state", "unpin", str(store), "nobody").returncode == 1
