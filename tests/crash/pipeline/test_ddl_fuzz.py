"""A few fixed seeds of the DDL fuzzer: random scripts on one pipeline, the capture killed, every value compared.

The long form: ``make ddl-fuzz SEED=… ROUNDS=…``.
"""

from __future__ import annotations

import pytest
from tests.fuzz.campaign import SOURCES, Plan, run
from tests.fuzz.mirrors import MIRRORS

pytestmark = pytest.mark.crash


@pytest.mark.timeout(300)
def test_random_schema_changes_leave_the_mirror_equal() -> None:
    plan = Plan(1, 6, sources=["postgres"], mirrors=["delta"], width=6, shrink_seconds=0)
    assert run(plan, print).failures == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mirror", MIRRORS)
@pytest.mark.parametrize("source", SOURCES)
def test_many_random_schema_changes_leave_the_mirror_equal(source: str, mirror: str) -> None:
    assert run(Plan(1, 40, sources=[source], mirrors=[mirror]), print).failures == []
