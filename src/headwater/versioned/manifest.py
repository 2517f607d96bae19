"""Manifest: one version of a versioned table: its runs, the oldest first, and what was committed of it. Pure.

``{"crc": …, "body": {…}}``, where the checksum is that of the body as it is written. docs/formats/versioned.md has it.
"""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from headwater.sources.table import SourceTable
from headwater.versioned.errors import RunCorrupt
from headwater.versioned.run_file import RunInfo

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version.

    :ivar number: counts the versions. :ivar id: of this one; *parent*: of the one before.
    :ivar table: as it was when its newest rows were committed. ``None``: there is nothing yet.
    :ivar query: that keeps it. :ivar backfill: … and the state of that query.
    :ivar exact: the epoch from which on it has its history as a whole: then it is the table as it was at :attr:`epoch`.
        ``None``: history is missing.
    :ivar runs: the oldest first.
    :ivar changes: per query the epoch up to which its changes are here.
    :ivar history: per query and backfill the plan and its attempt up to which its history is here.
    :ivar generations: per query the oldest generation whose processes may commit.
    """

    number: int = 0
    id: str = ""
    parent: str = ""
    table: SourceTable | None = None
    query: str = ""
    backfill: str = ""
    exact: int | None = None
    runs: tuple[RunInfo, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    history: Mapping[str, Sequence[int]] = field(default_factory=dict)
    generations: Mapping[str, int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Up to which the changes of its query are in its runs."""
        return max(self.changes.get(self.query, 0), self.exact or 0)

    def following(self, **changes: Any) -> Manifest:
        """The next one."""
        return replace(self, number=self.number + 1, id=uuid.uuid4().hex, parent=self.id, **changes)

    @property
    def rows(self) -> int:
        """About how many: those that were replaced and not yet merged count as well."""
        return sum(run.rows for run in self.runs)

    @property
    def size(self) -> int:
        return sum(run.size for run in self.runs)

    def to_json(self) -> str:
        body = {
            "version": VERSION,
            "number": self.number,
            "id": self.id,
            "parent": self.parent,
            "table": None if self.table is None else _table_to_json(self.table),
            "query": self.query,
            "backfill": self.backfill,
            "exact": self.exact,
            "runs": [[r.name, r.rows, r.size, r.first.hex(), r.last.hex(), r.plain] for r in self.runs],
            "changes": dict(self.changes),
            "history": {backfill: list(at) for backfill, at in self.history.items()},
            "generations": dict(self.generations),
        }
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
        return f'{{"crc":{zlib.crc32(text.encode())},"body":{text}}}'

    @classmethod
    def from_json(cls, text: str, name: str) -> Manifest:
        """:raises RunCorrupt: it is none, or of a later version."""
        try:
            head, _, rest = text.partition(',"body":')
            body_text = rest[:-1]
            if zlib.crc32(body_text.encode()) != int(head.removeprefix('{"crc":')):
                raise ValueError("checksum")
            body = json.loads(body_text)
            if body["version"] != VERSION:
                raise ValueError(body["version"])
            return cls(
                body["number"],
                body["id"],
                body["parent"],
                None if body["table"] is None else _table_of_json(body["table"]),
                body["query"],
                body["backfill"],
                body["exact"],
                tuple(_run(told) for told in body["runs"]),
                body["changes"],
                body["history"],
                body["generations"],
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise RunCorrupt(
                f"The manifest {name} is not one of version {VERSION}.",
                next_step="Restore it, or update Headwater if a later one wrote it.",
            ) from error


def _run(told: Sequence[Any]) -> RunInfo:
    name, rows, size, first, last, plain = told
    return RunInfo(name, rows, size, bytes.fromhex(first), bytes.fromhex(last), plain)


def _table_to_json(table: SourceTable) -> dict[str, Any]:
    return {
        "namespace": table.namespace,
        "name": table.name,
        "schema": base64.b64encode(table.schema.serialize().to_pybytes()).decode(),
        "key": list(table.key_columns),
        "source_id": table.source_id,
    }


def _table_of_json(told: Mapping[str, Any]) -> SourceTable:
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(told["schema"])))
    return SourceTable.of_log(told["namespace"], told["name"], schema, tuple(told["key"]), told["source_id"])
