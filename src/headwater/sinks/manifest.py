"""Manifest: one commit to a directory of Parquet files, as docs/formats/manifest.md has it. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.errors import CorruptionError
from headwater.sinks.errors import SinkError
from headwater.sinks.sink import Committed

VERSION: Final = 2


class ManifestDamaged(SinkError, CorruptionError):
    """A manifest is not what was written, or what it names is gone."""


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file: where it was staged, its name for good, its rows and bytes."""

    staged: str
    name: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One commit.

    :ivar files: that it brings. :ivar removed: names of those that they replace.
    :ivar changes: per query the epoch up to which its changes are here.
    :ivar history: per query and backfill the plan and its attempt up to which its history is here.
    :ivar all: every file that is there with it; ``None``: those of the manifest before, without *removed*, and *files*.
    :ivar id: of this manifest; *parent*: of the one before. Of version 1 they are empty.
    :ivar generations: per query the oldest generation whose processes may commit.
    :ivar table: the full name of the table whose rows they are; empty: it was not written down.
    """

    number: int = 0
    files: tuple[ManifestFile, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    history: Mapping[str, Sequence[int]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    all: tuple[ManifestFile, ...] | None = None
    id: str = ""
    parent: str = ""
    generations: Mapping[str, int] = field(default_factory=dict)
    table: str = ""

    def committed(self, query: str, backfill: str) -> Committed:
        plan, attempt = self.history.get(f"{query}/{backfill}", (0, 0))
        return Committed(self.changes.get(query, 0), plan, attempt)

    def following(
        self,
        files: Sequence[ManifestFile],
        removed: Sequence[str] = (),
        changes: Mapping[str, int] | None = None,
        history: Mapping[str, Sequence[int]] | None = None,
        generations: Mapping[str, int] | None = None,
        table: str = "",
    ) -> Manifest:
        """The next one."""
        return Manifest(
            self.number + 1,
            tuple(files),
            self.changes if changes is None else changes,
            self.history if history is None else history,
            tuple(removed),
            id=uuid.uuid4().hex,
            parent=self.id,
            generations=self.generations if generations is None else generations,
            table=table or self.table,
        )

    def after(self, before: Sequence[ManifestFile]) -> tuple[ManifestFile, ...]:
        """All files, if *before* are those of the one before; new ones are where those were that they replace."""
        gone = set(self.removed)
        place = next((place for place, one in enumerate(before) if one.name in gone), len(before))
        left = [one for one in before[place:] if one.name not in gone]
        return (*before[:place], *self.files, *left)

    def to_json(self) -> str:
        told = asdict(self)
        if self.all is None:
            del told["all"]
        if not self.table:
            del told["table"]
        return json.dumps({"version": VERSION, **told}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """:raises ManifestDamaged: it is none, or of a later version."""
        try:
            read: dict[str, Any] = json.loads(text)
            if read["version"] not in (1, VERSION):
                raise ValueError(read["version"])
            files, all_files = (
                None if found is None else tuple(ManifestFile(**file) for file in found)
                for found in (read["files"], read.get("all"))
            )
            told = (tuple(read.get("removed", ())), all_files, read.get("id", ""), read.get("parent", ""))
            generations = read.get("generations", {})
            table = read.get("table", "")
            return cls(read["number"], files or (), read["changes"], read["history"], *told, generations, table)
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestDamaged(
                f"The manifest {path.name} is not one of version 1 or {VERSION}.",
                next_step="Restore it, or update Headwater if a later one wrote it.",
            ) from error
