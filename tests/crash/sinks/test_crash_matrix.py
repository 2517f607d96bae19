"""A sample of the crash matrix: some kills of every sink in one of its modes. All of them: ``make crash-matrix``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from tests.crash.sinks.matrix import EXACT, STAGED_IN_FILES, Matrix, damaged_cell, sampled, tried
from tests.db.sinks.cases import Servers

KILLS = 2
SEED = int(os.environ.get("HEADWATER_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Servers() as servers:
        yield Matrix(servers, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("kind", sorted({case.kind for case in EXACT}))
def test_killed_at_some_steps(kind: str, matrix: Matrix) -> None:
    case = random.Random(SEED).choice([case for case in EXACT if case.kind == kind])
    cells = sampled(matrix.cells(case), KILLS, SEED)
    print(f"HEADWATER_SEED={SEED}: {', '.join(map(str, cells))}")
    for cell, wrong in tried(matrix, cells, 2):
        assert wrong is None, str(cell)


def test_staged_files_that_are_damaged_after_a_kill_are_staged_again(matrix: Matrix) -> None:
    """Of one sink of files. The next process must not commit them."""
    case = random.Random(SEED).choice([case for case in EXACT if case.kind in STAGED_IN_FILES - {"kafka"}])
    print(f"HEADWATER_SEED={SEED}: {case}")
    matrix.clean(case)
    assert matrix.try_cell(damaged_cell(case)) is None, str(case)
