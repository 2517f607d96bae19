"""Which columns a message of the log means, and which changes of the catalog mean that rows were rewritten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sources.postgres.identity import Leaf, TableIdentity, column_numbers

INT = [23, -1, 0, "700", None]


def identity(columns: dict[int, Any], numbers: int | None = None, file: int = 1, **more: Any) -> TableIdentity:
    return TableIdentity(1, 2, more.get("leaves", {}), numbers or max(columns), file, columns)


def test_the_text_of_an_identity_gives_it_back() -> None:
    leaves = {9: Leaf("public.t_a", 5, False, 700, False, 3)}
    one = identity({1: INT, 2: [25, -1, 100, "701", {"16400": "sad"}]}, leaves=leaves)
    assert TableIdentity.from_text(one.to_text()) == one


def test_an_identity_of_an_earlier_version_says_nothing_of_rewrites() -> None:
    old = TableIdentity.from_text('{"publication": 1, "entry": 2, "leaves": {"9": ["public.t_a", 5, false, 700]}}')
    assert old.rewritten(identity({1: INT}, file=77)) is None
    assert old.leaves[9].file == 5


ENUM = [16390, -1, 0, "700", {"16400": "sad", "16402": "glad"}]
CHANGES: dict[str, tuple[TableIdentity, bool]] = {
    "nothing": (identity({1: INT, 2: ENUM}), False),
    "vacuum full": (identity({1: INT, 2: ENUM}, file=2), False),
    "rename or default": (identity({1: [23, -1, 0, "800", None], 2: ENUM}), False),
    "nullable add": (identity({1: INT, 2: ENUM, 3: INT}), False),
    "drop and vacuum full": (identity({1: INT}, 2, file=2), False),
    "add with a volatile default": (identity({1: INT, 2: ENUM, 3: INT}, file=2), True),
    "type using, the same type": (identity({1: [23, -1, 0, "800", None], 2: ENUM}, file=2), True),
    "wider, no rewrite": (identity({1: [20, -1, 0, "800", None], 2: ENUM}), False),
    "label added": (identity({1: INT, 2: [*ENUM[:4], {"16400": "sad", "16402": "glad", "16404": "new"}]}), False),
    "label renamed": (identity({1: INT, 2: [*ENUM[:4], {"16400": "blue", "16402": "glad"}]}), True),
    "label renamed, its name given again": (
        identity({1: INT, 2: [*ENUM[:4], {"16400": "blue", "16402": "glad", "16404": "sad"}]}),
        True,
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_rows_were_rewritten_after(how: str) -> None:
    now, expected = CHANGES[how]
    assert (identity({1: INT, 2: ENUM}).rewritten(now) is not None) is expected


def test_a_column_that_is_published_later_has_values_that_no_log_told() -> None:
    assert replace(identity({1: INT}), numbers=2).rewritten(identity({1: INT, 2: INT})) is not None


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[set[int], int]], int]:
    """The columns of a table after each of some changes, with how many it ever had; and one of these moments."""
    live, numbers = {1, 2, 3}, 3
    states = [(set(live), numbers)]
    for add in draw(st.lists(st.booleans(), max_size=8)):
        if add:
            numbers += 1
            live.add(numbers)
        elif len(live) > 1:
            live.remove(draw(st.sampled_from(sorted(live))))
        states.append((set(live), numbers))
    return states, draw(st.integers(0, len(states) - 1))


@given(histories())
def test_a_message_is_matched_right_or_not_at_all(history: tuple[list[tuple[set[int], int]], int]) -> None:
    states, moment = history
    (before, numbers), (now, all_numbers) = states[0], states[-1]
    message = states[moment][0]
    kept = identity(dict.fromkeys(now, INT), all_numbers)
    matched = column_numbers(len(message), sorted(before), numbers, kept)
    assert matched in (None, sorted(message))


@given(histories())
def test_without_drops_a_message_is_always_matched(history: tuple[list[tuple[set[int], int]], int]) -> None:
    states, moment = history
    numbers = states[-1][1]
    message = list(range(1, states[moment][1] + 1))
    kept = identity(dict.fromkeys(range(1, numbers + 1), INT))
    assert column_numbers(len(message), [1, 2, 3], 3, kept) == message
