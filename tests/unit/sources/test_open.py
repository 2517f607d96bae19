"""A source by its connection string, and what is said where its driver is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.sources.errors import DriverMissing, InvalidDsn, SourceMisconfigured
from headwater.sources.open import Family, driver, family_of, full_name, open_source

DSN = "postgresql://cdc:secret@db.example/shop"
MYSQL = "mysql://cdc:secret@db.example/shop"
MONGODB = "mongodb://cdc:secret@db.example/shop?replicaSet=rs0"


def test_what_is_no_database_is_refused_without_repeating_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidDsn) as refused:
        open_source("oracle://cdc:secret@db.example/shop", spill=tmp_path)
    assert "secret" not in str(refused.value)


def test_a_family_is_known_by_its_scheme_and_names_its_tables_in_its_own_way() -> None:
    assert [family_of(dsn) for dsn in (DSN, "host=x", MYSQL, "mariadb://h/", "oracle://h/")] == [
        Family.POSTGRES,
        Family.POSTGRES,
        Family.MYSQL,
        Family.MYSQL,
        None,
    ]
    assert (full_name(DSN, "Orders"), full_name(MYSQL, "Orders")) == ("public.orders", 'shop."Orders"')


@pytest.mark.parametrize(
    ("driver", "extra", "command"),
    [
        ("psycopg", "postgres", ["capture", DSN, "--table", "t"]),
        ("psycopg", "postgres", ["doctor", DSN]),
        ("psycopg", "postgres", ["demo"]),
        ("pymysql", "mysql", ["capture", MYSQL, "--table", "t"]),
        ("pymysql", "mysql", ["doctor", MYSQL]),
        ("pymongo", "mongodb", ["capture", MONGODB, "--table", "t", "--store", "store"]),
        ("pymongo", "mongodb", ["doctor", MONGODB]),
    ],
)
def test_without_the_driver_every_command_names_what_to_install(
    driver: str, extra: str, command: list[str], tmp_path: Path
) -> None:
    program = (
        f"import sys; sys.modules[{driver!r}] = None\n"
        "from headwater.cli.main import run\n"
        f"sys.argv = ['headwater', *{command!r}]\n"
        "run()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert f"pip install 'headwater[{extra}]'" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "secret" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_collections_are_named_as_mongodb_names_them_and_only_they_may_have_declared_columns(tmp_path: Path) -> None:
    assert family_of(MONGODB) is family_of("mongodb+srv://db.example/") is Family.MONGODB
    assert full_name(MONGODB, "orders") == "shop.orders"
    assert full_name(MONGODB, "stock.fs.files") == 'stock."fs.files"'
    for dsn in (DSN, MYSQL):
        with pytest.raises(SourceMisconfigured, match="are declared"):
            open_source(dsn, spill=tmp_path, columns={"shop.t": "document"})


def test_a_driver_without_its_library_is_a_missing_driver() -> None:
    with pytest.raises(DriverMissing, match="headwater\\[postgres\\]"), driver(Family.POSTGRES):
        raise ImportError("no pq wrapper available.\nAttempts made: …")


def test_other_imports_that_fail_are_left_alone() -> None:
    with pytest.raises(ImportError, match="numpy"), driver(Family.POSTGRES):
        raise ImportError("numpy is broken", name="numpy")
