"""Where ``headwater capture`` has its connection string from; the list of processes never shows a password."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.postgres import Database
from typer.testing import CliRunner

from headwater.cli.main import app
from headwater.errors import InputError
from headwater.sources.dsn import DsnUnreadable
from headwater.sources.errors import InvalidDsn

pytestmark = pytest.mark.db


def test_the_password_is_not_in_the_list_of_processes(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    (tmp_path / "dsn").write_text(f"{newest_postgres.dsn}\n")
    process = subprocess.Popen(
        [*(sys.executable, "-m", "headwater.cli.main", "capture", "--dsn-file", "dsn", "--table", "t", "--json")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["state"] == "running":
            break
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    process.terminate()
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert newest_postgres.server.password.encode() not in command
    assert newest_postgres.server.password not in out + complaints


def test_the_capture_needs_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOP_DSN", raising=False)

    def refused(*arguments: str) -> BaseException:
        done = CliRunner().invoke(app, ["capture", *arguments])
        assert done.exception is not None
        return done.exception

    assert "needs one" in str(refused())
    assert "needs one" in str(refused("postgresql://u@db/shop", "--dsn-env", "SHOP_DSN"))
    assert "export SHOP_DSN=" in str(refused("--dsn-env", "SHOP_DSN"))
    assert isinstance(refused("--dsn-env", "SHOP_DSN"), InputError)
    assert isinstance(refused("--dsn-file", "missing"), DsnUnreadable)
    monkeypatch.setenv("SHOP_DSN", "nothing://u:secret@db/shop")
    assert isinstance(refused("--dsn-env", "SHOP_DSN"), InvalidDsn)


def test_a_password_in_the_arguments_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["capture", "nothing://u:secret@db/shop"])
    assert "list of processes" in done.stderr
    assert "secret" not in done.output
