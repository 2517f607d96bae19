"""A process that slept while another one took over commits nothing when it wakes up: a sample of the crash matrix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.crash.sinks.matrix import EXACT, Cell, How, Matrix, frozen_cells
from tests.db.sinks.cases import Servers
from tests.sampled import share


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Servers() as servers:
        yield Matrix(servers, tmp_path_factory.mktemp("matrix"))


def sampled(how: How, number: int, of: int) -> list[Cell]:
    """One cell of each of some cases; in a soak all cells of all."""
    found = []
    for place, case in enumerate(share(EXACT, number, of)):
        cells = [cell for cell in frozen_cells(case) if cell.how is how]
        found += share(cells, place, len(cells))
    return found


@pytest.mark.parametrize("cell", [*sampled(How.FROZEN, 1, 3), *sampled(How.FORGOTTEN, 0, 3)], ids=str)
def test_a_process_that_was_taken_over_commits_nothing(cell: Cell, matrix: Matrix) -> None:
    if cell.how is How.FROZEN:
        matrix.clean(cell.case)
    assert matrix.try_cell(cell) is None, str(cell)
