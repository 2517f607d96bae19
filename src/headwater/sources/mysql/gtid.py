"""Sets of transactions as MySQL and MariaDB name them. Pure.

========  ==================================  ==========================================================
family    text                                meaning
========  ==================================  ==========================================================
MySQL     ``uuid:1-5:7,uuid:tag:1-3``         which transactions of which servers were executed
MariaDB   ``0-1-5000,3-2-7``                  the last transaction of each domain: ``domain-server-number``
========  ==================================  ==========================================================

Both count their transactions: :attr:`size` grows with each one that is added, by the same amount on whichever server it
is read. That is what positions are ordered by, so that they keep their order after a failover.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

from headwater.sources.errors import InvalidOffset, SourceWentBack

_TAG: Final = re.compile(r"[a-z_][a-z0-9_]{0,31}")
_TAGGED_FORMAT: Final = 1
_LARGEST: Final = 1 << 63

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""Half open, ascending, apart from each other."""


@dataclass(frozen=True, slots=True)
class MySqlGtids:
    """The transactions that a MySQL server has executed.

    :ivar intervals: by server and tag; the tag is empty where there is none.
    """

    intervals: Mapping[tuple[UUID, str], Intervals] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MySqlGtids:
        """:raises InvalidOffset: it is no such set."""
        found: dict[tuple[UUID, str], list[tuple[int, int]]] = {}
        try:
            for of_server in filter(None, (part.strip() for part in text.replace("\n", "").split(","))):
                server, *rest = (part.strip() for part in of_server.split(":"))
                key = (UUID(server), "")
                for part in rest:
                    if _TAG.fullmatch(part.lower()):
                        key = (key[0], part.lower())
                        continue
                    first, _, last = part.partition("-")
                    start, end = int(first), int(last or first) + 1
                    if not 0 < start < end <= _LARGEST:
                        raise ValueError
                    found.setdefault(key, []).append((start, end))
        except ValueError:
            raise _invalid("MySQL", "uuid:1-5") from None
        return cls({key: _merged(parts) for key, parts in found.items()})

    @property
    def size(self) -> int:
        """How many transactions it has."""
        return sum(end - start for parts in self.intervals.values() for start, end in parts)

    def has(self, server: UUID, tag: str, number: int) -> bool:
        return any(start <= number < end for start, end in self.intervals.get((server, tag), ()))

    def with_transaction(self, server: UUID, tag: str, number: int) -> MySqlGtids:
        """With one more; the usual one, the next of its server, costs little."""
        parts = self.intervals.get((server, tag), ())
        if len(parts) and parts[-1][1] == number:
            made: Intervals = (*parts[:-1], (parts[-1][0], number + 1))
        else:
            made = _merged([*parts, (number, number + 1)])
        return MySqlGtids({**self.intervals, (server, tag): made})

    def union(self, other: MySqlGtids) -> MySqlGtids:
        keys = self.intervals.keys() | other.intervals.keys()
        return MySqlGtids({key: _merged([*self.intervals.get(key, ()), *other.intervals.get(key, ())]) for key in keys})

    def minus(self, other: MySqlGtids) -> MySqlGtids:
        """Without those of *other*."""
        made = {key: _without(parts, other.intervals.get(key, ())) for key, parts in self.intervals.items()}
        return MySqlGtids({key: parts for key, parts in made.items() if parts})

    def contains(self, other: MySqlGtids) -> bool:
        """Whether it has every transaction of *other*."""
        return self.union(other) == self

    def overlaps(self, other: MySqlGtids) -> bool:
        """Whether some transaction is in both."""
        return self.size + other.size > self.union(other).size

    def encoded(self) -> bytes:
        """For COM_BINLOG_DUMP_GTID; sets without tags as every server reads them."""
        keys = sorted(self.intervals, key=lambda key: (key[0].bytes, key[1]))
        tagged = any(tag for _, tag in keys)
        count = len(keys) << 8 | _TAGGED_FORMAT << 56 | _TAGGED_FORMAT if tagged else len(keys)
        parts = [struct.pack("<Q", count)]
        for server, tag in keys:
            intervals = self.intervals[server, tag]
            parts.append(server.bytes)
            if tagged:
                parts.append(bytes((len(tag) << 1,)) + tag.encode())  # a number of one byte is shifted by its length
            parts.append(struct.pack("<Q", len(intervals)))
            parts.extend(struct.pack("<QQ", start, end) for start, end in intervals)
        return b"".join(parts)

    def __str__(self) -> str:
        texts: dict[UUID, str] = {}
        for (server, tag), parts in sorted(self.intervals.items(), key=lambda item: (item[0][0].bytes, item[0][1])):
            told = ":".join(f"{start}-{end - 1}" if end - start > 1 else f"{start}" for start, end in parts)
            texts[server] = texts.get(server, str(server)) + (f":{tag}" if tag else "") + f":{told}"
        return ",".join(texts.values())


@dataclass(frozen=True, slots=True)
class MariaDbGtids:
    """The last transaction of each replication domain of a MariaDB server.

    :ivar last: server and number by domain.
    """

    last: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MariaDbGtids:
        """:raises InvalidOffset: it is no such position."""
        found: dict[int, tuple[int, int]] = {}
        try:
            for part in filter(None, (part.strip() for part in text.split(","))):
                domain, server, number = (int(one) for one in part.split("-"))
                if number >= found.get(domain, (0, -1))[1]:
                    found[domain] = (server, number)
        except ValueError:
            raise _invalid("MariaDB", "0-1-5000") from None
        return cls(found)

    @property
    def size(self) -> int:
        """The numbers of all domains together: each transaction makes it larger."""
        return sum(number for _, number in self.last.values())

    def with_transaction(self, domain: int, server: int, number: int) -> MariaDbGtids:
        """After one more. :raises SourceWentBack: its domain was past that number already."""
        if domain in self.last and number <= self.last[domain][1]:
            raise SourceWentBack(
                f"The transaction {domain}-{server}-{number} comes after {domain}-{self.last[domain][0]}-"
                f"{self.last[domain][1]}: two servers wrote into one replication domain.",
                next_step="Give each its own gtid_domain_id, SET GLOBAL gtid_strict_mode = ON; "
                "then run: headwater resnapshot",
            )
        return MariaDbGtids({**self.last, domain: (server, number)})

    def union(self, other: MariaDbGtids) -> MariaDbGtids:
        """The later one in each domain."""
        made = dict(self.last)
        for domain, (server, number) in other.last.items():
            if number > made.get(domain, (0, -1))[1]:
                made[domain] = (server, number)
        return MariaDbGtids(made)

    def contains(self, other: MariaDbGtids) -> bool:
        """Whether it is as far as *other* in every domain."""
        return all(number <= self.last.get(domain, (0, -1))[1] for domain, (_, number) in other.last.items())

    def overlaps(self, other: MariaDbGtids) -> bool:
        """Whether some domain is in both."""
        return bool(self.last.keys() & other.last.keys())

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{number}" for domain, (server, number) in sorted(self.last.items()))


Gtids: TypeAlias = MySqlGtids | MariaDbGtids


def contains(larger: Gtids, smaller: Gtids) -> bool:
    """Whether *larger* has all of *smaller*; sets of two families never do."""
    if isinstance(larger, MySqlGtids):
        return isinstance(smaller, MySqlGtids) and larger.contains(smaller)
    return isinstance(smaller, MariaDbGtids) and larger.contains(smaller)


def _merged(parts: Iterable[tuple[int, int]]) -> Intervals:
    made: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((start, end))
    return tuple(made)


def _without(parts: Intervals, others: Intervals) -> Intervals:
    made: list[tuple[int, int]] = []
    for start, end in parts:
        for from_, upto in others:
            if from_ < end and upto > start:
                if start < from_:
                    made.append((start, from_))
                start = max(start, upto)
        if start < end:
            made.append((start, end))
    return tuple(made)


def _invalid(family: str, example: str) -> InvalidOffset:
    return InvalidOffset(f"The text is no set of transactions of {family}.", next_step=f"Give one like {example}.")
