"""The scripts of the fuzzer: the same for the same seed, and shrunk to what fails."""

from __future__ import annotations

import pytest
from tests.fuzz.campaign import KINDS, SOURCES, build
from tests.fuzz.mysql_script import SCHEMA as MYSQL
from tests.fuzz.postgres_script import SCHEMA as POSTGRES
from tests.fuzz.script import CHECK, HARNESS
from tests.fuzz.shrink import shrink
from tests.fuzz.values import Rows, difference


@pytest.mark.parametrize("source", SOURCES)
def test_a_round_follows_from_the_seed_and_its_number(source: str) -> None:
    assert build(source, 7, 3) == build(source, 7, 3)
    assert len({str(build(source, seed, number)) for seed in range(4) for number in range(5)}) == 20


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_statement_comes_and_can_be_left_out(source: str) -> None:
    seen = frozenset().union(*(build(source, 1, number).names for number in range(150)))
    assert (set(POSTGRES) if source == "postgres" else set(MYSQL)) <= seen
    without = [build(source, 1, number, KINDS) for number in range(20)]
    assert not frozenset().union(*(script.names for script in without)) & KINDS


@pytest.mark.parametrize("source", SOURCES)
def test_no_transaction_is_open_at_a_comparison(source: str) -> None:
    for number in range(40):
        is_open: set[int] = set()
        for step in build(source, 1, number).steps:
            if step.text == "BEGIN":
                assert step.session not in is_open
                is_open.add(step.session)
            elif step.text in ("COMMIT", "ROLLBACK"):
                is_open.remove(step.session)
            elif step.session == HARNESS and step.text == CHECK:
                assert not is_open
        assert not is_open


def test_what_does_not_matter_is_left_out() -> None:
    tried = 0

    def failing(scripts: list[list[int]]) -> int | None:
        nonlocal tried
        tried += len(scripts)
        return next((place for place, steps in enumerate(scripts) if {3, 17} <= set(steps)), None)

    assert shrink(range(40), failing) == [3, 17]
    assert tried < 120


def test_values_are_compared_and_not_their_types() -> None:
    source = Rows(("id", "v"), ("int", "decimal"), ((1, "1.50"), (2, None)))
    assert difference(source, Rows(("v", "id", "old"), (), ((None, 2, "x"), (1.5, 1, "x")))) is None
    assert "v in 1" in str(difference(source, Rows(("id", "v"), (), ((1, "1.5"), (2, 0)))))
    assert "1 missing" in str(difference(source, Rows(("id", "v"), (), ((1, "1.5"),))))
    assert "1 only in the mirror" in str(difference(source, Rows(("id", "v"), (), ((1, 1.5), (2, None), (2, None)))))
