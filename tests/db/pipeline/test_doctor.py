"""The doctor of a pipeline over a real database: what keeps tables out, and what was meant."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from tests.servers.postgres import Database

from headwater.pipeline.config import PipelineConfig, configure
from headwater.pipeline.doctor import examine_pipeline
from headwater.pipeline.errors import ConfigError
from headwater.pipeline.tables import choose_tables
from headwater.sources.diagnosis import Level

pytestmark = pytest.mark.db


def config_of(database: Database, folder: Path, *tables: str, **options: object) -> PipelineConfig:
    sink = {"kind": "delta", "path": "lake", **options}
    return configure({"source": {"dsn": database.dsn, "tables": list(tables)}, "sink": [sink]}, folder=folder)


def test_a_table_that_is_left_out_is_told_with_the_statement_that_lets_it_in(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE audit (what text)")
    config = config_of(newest_postgres, tmp_path, "public.*")
    (finding,) = [one for one in examine_pipeline(config).findings if one.check == "tables"]
    assert (finding.level, finding.table) == (Level.NOTE, "public.audit")
    assert "cannot be captured" not in finding.text
    assert finding.fix
    newest_postgres.execute(finding.fix)
    assert choose_tables(config).names == ("public.audit", "public.orders")


def test_a_pattern_that_stands_for_nothing_names_the_nearest(newest_postgres: Database, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="right one"):
        choose_tables(config_of(newest_postgres, tmp_path, "public.*"))
    newest_postgres.execute("CREATE TABLE audit (what text)")
    with pytest.raises(ConfigError, match="REPLICA IDENTITY"):
        choose_tables(config_of(newest_postgres, tmp_path, "public.*"))
    newest_postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    for pattern, step in (("publik.*", 'Did you mean "public.*"?'), ("zzz*", "public.*")):
        with pytest.raises(ConfigError) as refused:
            choose_tables(config_of(newest_postgres, tmp_path, pattern))
        assert step in str(refused.value.next_step)


def test_a_pattern_that_matches_nothing_is_an_error_also_beside_others_and_offers_a_spelling_that_works(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        'CREATE TABLE "OrderLines" (id int PRIMARY KEY)',
        'CREATE SCHEMA "Chinook"',
        'CREATE TABLE "Chinook".album (id int PRIMARY KEY)',
        'CREATE TABLE "Chinook"."Track" (id int PRIMARY KEY)',
        'CREATE SCHEMA "a [b]"',
        'CREATE TABLE "a [b]"."c.d" (id int PRIMARY KEY)',
    )
    cases = {
        "Chinook.*": ['"Chinook"."Track"', '"Chinook".album'],
        "chinook.?rack": ['"Chinook"."Track"'],
        "Public.ord*s": ['public."OrderLines"', "public.orders"],
        "order?": ["public.orders"],
        "A [[]b].*": ['"a [b]"."c.d"'],
        "publik.*": ['public."OrderLines"', "public.orders"],
    }
    for pattern, meant in cases.items():
        config = config_of(newest_postgres, tmp_path, "public.orders", "pub*.orders", pattern)
        with pytest.raises(ConfigError, match=r"no table matches") as refused:
            choose_tables(config)
        assert pattern in refused.value.message
        assert "pub*" not in refused.value.message
        findings = examine_pipeline(config).findings
        assert refused.value.message in [one.text for one in findings if one.level is Level.PROBLEM]
        assert refused.value.next_step is not None
        offered = ", ".join(re.findall("""'[^']*'|"[^"]*\"""", refused.value.next_step))
        written = tomllib.loads(f"tables = [{offered}]")["tables"]
        assert set(choose_tables(config_of(newest_postgres, tmp_path, *written)).names) == set(meant)
    config = config_of(newest_postgres, tmp_path, "*", tables=["public.orders", "Chinook.*"])
    problems = [one for one in examine_pipeline(config).findings if one.level is Level.PROBLEM]
    assert ("[[sink]] delta tables: no table matches Chinook.*.", True) in [
        (one.text, "Write '\"Chinook\".*'" in str(one.fix)) for one in problems
    ]


def test_a_delta_table_that_others_created_is_a_problem_before_the_pipeline_runs(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)", "CREATE TABLE lines (id int PRIMARY KEY)")
    write_deltalake(tmp_path / "lake" / "public.orders", pa.table({"id": pa.array([1], pa.int32())}))
    config = config_of(newest_postgres, tmp_path, "public.*")
    (problem,) = [
        one for one in examine_pipeline(config).findings if one.check == "sink" and one.level is Level.PROBLEM
    ]
    assert problem.table == "public.orders"
    assert "not created by Headwater" in problem.text
    assert "adopt = true" in str(problem.fix)
    adopting = config_of(newest_postgres, tmp_path, "public.*", adopt=True)
    assert all(one.level is Level.OK for one in examine_pipeline(adopting).findings if one.check == "sink")


def test_two_tables_with_one_target_are_a_problem_before_the_pipeline_runs(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute("CREATE SCHEMA a", "CREATE SCHEMA b")
    newest_postgres.execute("CREATE TABLE a.orders (id int PRIMARY KEY)", "CREATE TABLE b.orders (id int PRIMARY KEY)")
    sink = {"kind": "postgres", "dsn": newest_postgres.dsn, "schema": "copy"}
    source = {"dsn": newest_postgres.dsn, "tables": ["a.*", "b.*"]}
    config = configure({"source": source, "sink": [sink]}, folder=tmp_path)
    (problem,) = [
        one for one in examine_pipeline(config).findings if one.check == "sink" and one.level is Level.PROBLEM
    ]
    assert problem.text.startswith("Tables a.orders and b.orders have the same target copy.orders at postgres:")
