"""Derived tables: what a batch over the whole tables gives at the epoch that they claim, while somebody writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from tests.deriving import Deriving
from tests.servers.postgres import Database
from tests.spark.keeper import Keeper, Row
from tests.spark.test_kept_tables import LEFT, RIGHT, Transfers, fill

from headwater.derive.derivation import Derivation
from headwater.derive.errors import EpochLost, FunctionChanged, KeyNotUnique, ResultChanged
from headwater.derive.planner import release_pins
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Sink

Model = Callable[[list[Row], list[Row]], list[Row]]


def totals(accounts: Any) -> Any:
    """A keyed aggregate: by what is left of the amounts."""
    grouped = accounts.withColumn("bucket", F.col("amount") % 7).groupBy("name")
    return grouped.agg(F.sum("amount").alias("amount"), F.count("*").alias("rows"))


def of_totals(left: list[Row], _: list[Row]) -> list[Row]:
    amounts: Counter[str] = Counter()
    for _id, amount, name in left:
        amounts[name] += amount
    counts = Counter(name for _id, _amount, name in left)
    return sorted((name, amounts[name], count) for name, count in counts.items())


def rich(accounts: Any) -> Any:
    """A transform, of single rows: some are left out, and come and go with their amounts."""
    return accounts.where("amount > 990").select(
        "id", F.upper("name").alias("name"), (F.col("amount") * 2).alias("double")
    )


def of_rich(left: list[Row], _: list[Row]) -> list[Row]:
    return sorted((key, name.upper(), 2 * amount) for key, amount, name in left if amount > 990)


def both(accounts: Any, savings: Any) -> Any:
    """Two tables, joined on what they go by."""
    renamed = savings.select(F.col("id").alias("other"), F.col("amount").alias("saved"))
    joined = accounts.join(renamed, accounts.id == renamed.other, "full_outer")
    money = F.coalesce("amount", F.lit(0)) + F.coalesce("saved", F.lit(0))
    return joined.select(F.coalesce("id", "other").alias("id"), money.alias("money"))


def of_both(left: list[Row], right: list[Row]) -> list[Row]:
    money: Counter[int] = Counter()
    keys = {row[0] for row in (*left, *right)}
    for key, amount, _name in (*left, *right):
        money[key] += amount
    return sorted((key, money[key]) for key in keys)


CASES: dict[str, tuple[Callable[..., Any], Model, list[str], list[str]]] = {
    "totals": (totals, of_totals, [LEFT], ["name"]),
    "rich": (rich, of_rich, [LEFT], ["id"]),
    "both": (both, of_both, [LEFT, RIGHT], ["id"]),
}


@pytest.fixture
def keeper(newest_postgres: Database, tmp_path: Path) -> Iterator[Keeper]:
    newest_postgres.execute(
        f"CREATE TABLE {LEFT} (id int PRIMARY KEY, amount bigint, name text)",
        f"CREATE TABLE {RIGHT} (id int PRIMARY KEY, amount bigint, name text)",
    )
    made = Keeper(newest_postgres, tmp_path, [LEFT, RIGHT])
    yield made
    made.close()


def runner_of(
    keeper: Keeper, spark: Any, name: str, function: Callable[..., Any], tables: list[str], by: list[str], sink: Sink
) -> Deriving:
    derivation = Derivation.of(name, function, tables, by)
    return Deriving(keeper.store, keeper.folder, derivation, function, sink, spark)


def delivered(folder: Path, name: str) -> list[Row]:
    table = DeltaTable(str(folder / f"derived.{name}")).to_pyarrow_table()
    return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.mark.timeout(300)
def test_results_are_those_of_a_batch_at_every_epoch_that_they_claim(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    fill(newest_postgres)
    keeper.catch_up()
    writer = Transfers(newest_postgres)
    keeper.fold_on()
    sink = open_sink("delta", path=str(tmp_path / "lake"))
    claimed = 0
    try:
        for name, (function, model, tables, by) in CASES.items():
            with closing(runner_of(keeper, spark, name, function, tables, by, sink)) as runner:
                for _ in range(3):
                    before = runner.epoch
                    assert runner.step()
                    assert runner.epoch > before
                    epoch = runner.epoch
                    expected = model(keeper.model(LEFT, epoch), keeper.model(RIGHT, epoch))
                    assert delivered(tmp_path / "lake", name) == expected, (name, epoch)
                    claimed += 1
                assert runner.batches == 3
    finally:
        writer.stop()
    assert claimed == 9


def test_a_second_life_goes_on_from_what_the_sink_has_until_a_table_must_be_read_once_more(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    fill(newest_postgres)
    keeper.catch_up()
    sink = open_sink("delta", path=str(tmp_path / "lake"))
    case = CASES["rich"]
    with closing(runner_of(keeper, spark, "rich", case[0], case[2], case[3], sink)) as runner:
        assert runner.step()
        assert not runner.step(), "nothing has changed"
        first = runner.epoch
    newest_postgres.execute(f"DELETE FROM {LEFT} WHERE id < 100", f"UPDATE {LEFT} SET amount = 2 WHERE id = 150")
    keeper.catch_up()
    keeper.fold()
    with closing(runner_of(keeper, spark, "rich", case[0], case[2], case[3], sink)) as runner:
        assert runner.epoch == first
        assert runner.step()
        assert delivered(tmp_path / "lake", "rich") == of_rich(keeper.model(LEFT, runner.epoch), [])

        newest_postgres.execute(
            f"UPDATE {LEFT} SET amount = 3000 WHERE id = 149",
            f"ALTER TABLE {LEFT} ADD COLUMN kind text DEFAULT 'new'",
            f"UPDATE {LEFT} SET amount = 3001 WHERE id = 148",
        )
        keeper.catch_up()
        while runner.step():
            assert delivered(tmp_path / "lake", "rich") != []
        assert not keeper.table(LEFT).pins(), "its history can be read once more: nobody pins it meanwhile"
        assert not runner.step()
        assert not runner.epoch


def test_what_changed_meanwhile_stops_a_derived_table(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    fill(newest_postgres)
    keeper.catch_up()
    sink = open_sink("delta", path=str(tmp_path / "lake"))
    case = CASES["rich"]
    with closing(runner_of(keeper, spark, "rich", case[0], case[2], case[3], sink)) as runner:
        assert runner.step()

    def other(accounts: Any) -> Any:
        return accounts.select("id", "name")

    newest_postgres.execute(f"UPDATE {LEFT} SET amount = 5000 WHERE id = 151")
    keeper.catch_up()
    with pytest.raises(FunctionChanged, match=r"are not those that made.*sink drop rich"):
        runner_of(keeper, spark, "rich", other, case[2], case[3], sink)
    release_pins(keeper.store, keeper.folder, "shop-rich", [LEFT])
    assert keeper.fold() > 0
    with (
        closing(runner_of(keeper, spark, "rich", case[0], case[2], case[3], sink)) as runner,
        pytest.raises(EpochLost, match=r"no longer have.*sink drop rich"),
    ):
        runner.step()
    elsewhere = open_sink("delta", path=str(tmp_path / "other"))
    with closing(runner_of(keeper, spark, "rich", case[0], case[2], case[3], elsewhere)) as runner:
        assert runner.step(), "a sink that has nothing of it is filled anew"
        assert delivered(tmp_path / "other", "rich") == of_rich(keeper.model(LEFT, runner.epoch), [])


def test_a_column_that_its_table_gets_stops_a_derived_table_whose_result_has_it(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    def whole(accounts: Any) -> Any:
        return accounts

    fill(newest_postgres)
    keeper.catch_up()
    sink = open_sink("delta", path=str(tmp_path / "lake"))
    with closing(runner_of(keeper, spark, "whole", whole, [LEFT], ["id"], sink)) as runner:
        assert runner.step()
        newest_postgres.execute(
            f"ALTER TABLE {LEFT} ADD COLUMN note text", f"UPDATE {LEFT} SET note = 'n' WHERE id = 151"
        )
        keeper.catch_up()
        with pytest.raises(ResultChanged, match=r"note is new.*sink drop whole"):
            runner.step()


def test_a_result_with_a_key_twice_is_refused_and_nothing_of_it_is_delivered(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    fill(newest_postgres)
    keeper.catch_up()

    def twice(accounts: Any) -> Any:
        return accounts.unionAll(accounts)

    sink = open_sink("delta", path=str(tmp_path / "lake"))
    with (
        closing(runner_of(keeper, spark, "twice", twice, [LEFT], ["id"], sink)) as runner,
        pytest.raises(Exception, match=KeyNotUnique.__name__),
    ):
        runner.step()
    assert not (tmp_path / "lake" / "derived.twice" / "_delta_log").exists()
