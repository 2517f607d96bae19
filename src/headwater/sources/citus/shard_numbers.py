"""The numbers of the shards that a table has, and what becomes of one that is gone. Pure.

A shard that moves keeps its number. One that is split, or out of which a tenant is taken, is gone, and others have its
rows. A node finds the table of a shard when it reads its log, so what it has not read by then comes under the name of
the shard, which nobody published: that rest is lost. So the numbers are kept with the position, and when one is gone:

==================================================================  =============================================
the alignment that had it last                                      the table
==================================================================  =============================================
was taken a moment ago, and all nodes have sent what lay before it  goes on, if they soon tell the rest, too
was taken a moment ago, and a node has not yet                      is waited for
is older, or of an earlier stream                                   is read again, unless all the nodes have was told
==================================================================  =============================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

SPLIT_SECONDS: Final = 5.0
"""How long after the alignment that had a shard last the nodes may take to tell what they had when it was gone."""


def ranges_of(numbers: Iterable[int]) -> str:
    """As text: numbers that follow one another, as most do, are one range."""
    made: list[list[int]] = []
    for number in sorted(set(numbers)):
        if made and made[-1][-1] == number - 1:
            made[-1][1:] = [number]
        else:
            made.append([number])
    return ",".join("-".join(map(str, pair)) for pair in made)


def numbers_of(text: str) -> frozenset[int]:
    """The inverse of :func:`ranges_of`. :raises ValueError: it is no such text."""
    found: set[int] = set()
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def tables_with_gone(before: Mapping[str, frozenset[int]], now: Mapping[str, frozenset[int]]) -> list[str]:
    """Those of *now* that have not all shards of *before*; one without any was dropped, which is told elsewhere."""
    return [name for name, numbers in now.items() if numbers and not before.get(name, frozenset()) <= numbers]


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The alignment that all known shards were seen in last.

    :ivar moment: when it was taken, of a clock that never goes back. :ivar ends: of the logs, by group.
    """

    moment: float
    ends: Mapping[int, int]


def was_all_told(
    last: LastSeen | None,
    moment: float,
    sent: Mapping[int, int],
    told: Mapping[int, int],
    ends: Mapping[int, int],
) -> bool | None:
    """Whether the nodes told all of the shards that are gone at *moment*; ``None``: it is too early to say.

    :param sent: up to where each node has sent its log. :param told: up to where that was told.
    :param ends: where the logs end now.
    """
    if last is None or moment - last.moment >= SPLIT_SECONDS:
        return all(told.get(group, 0) >= end for group, end in ends.items())
    return True if all(sent.get(group, 0) >= end for group, end in last.ends.items() if group in sent) else None
