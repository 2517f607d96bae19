"""Manifests: which files a directory of Parquet files has, in the order in which batches brought them.

``_headwater/<number>.json`` is one committed batch: the names of its files and, for every query that ever delivered
here, how far it came. Numbers have no gaps, and a number is given once: a manifest is written under another name and
then linked to its own, which fails if that is taken. So the newest manifest tells what is committed, and of two
processes that commit the same batch one finds that the other was faster.

A file waits in ``_staging`` until its manifest is there, then it is moved to where everybody sees it. Whoever comes
next moves what a process that died left behind.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater import failpoints
from headwater.errors import CorruptionError
from headwater.sinks.errors import SinkError, SinkUnwritable
from headwater.sinks.sink import Committed

DIRECTORY: Final = "_headwater"
STAGING: Final = "_staging"
VERSION: Final = 1

BEFORE_MANIFEST = failpoints.register("sink.parquet.before_manifest")
AFTER_MANIFEST = failpoints.register("sink.parquet.after_manifest")
BEFORE_MOVE = failpoints.register("sink.parquet.before_move")
AFTER_MOVE = failpoints.register("sink.parquet.after_move")


class ManifestDamaged(SinkError, CorruptionError):
    """A manifest is not what was written."""


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file: where it was staged, its name for good, its rows and bytes."""

    staged: str
    name: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed batch.

    :ivar changes: per query the epoch up to which its changes are here.
    :ivar history: per query and backfill the plan and its attempt up to which its history is here.
    """

    number: int = 0
    files: tuple[ManifestFile, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    history: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def committed(self, query: str, backfill: str) -> Committed:
        plan, attempt = self.history.get(f"{query}/{backfill}", (0, 0))
        return Committed(self.changes.get(query, 0), plan, attempt)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """:raises ManifestDamaged: it is none, or of a later version."""
        try:
            read: dict[str, Any] = json.loads(text)
            if read["version"] != VERSION:
                raise ValueError(read["version"])
            files = tuple(ManifestFile(**file) for file in read["files"])
            return cls(read["number"], files, read["changes"], read["history"])
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestDamaged(
                f"The manifest {path.name} is not one of version {VERSION}.",
                next_step="Restore it, or update Headwater if a later one wrote it.",
            ) from error


class Manifests:
    """The manifests of the directory *root* of one table."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = root / DIRECTORY

    def newest(self) -> Manifest:
        """The newest one; number 0 if there is none. What its process did not move is moved."""
        numbers = self._numbers()
        if not numbers:
            return Manifest()
        found = self._read(max(numbers))
        self.move(found)
        return found

    def all(self) -> list[Manifest]:
        """All of them, in order."""
        return [self._read(number) for number in sorted(self._numbers())]

    def put(self, manifest: Manifest) -> bool:
        """Commit; ``False``: its number is taken, and nothing is changed."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for parent in {(self._root / file.staged).parent for file in manifest.files}:
            if parent.exists():
                _sync(parent)
        draft = self._directory / f".{uuid.uuid4()}.draft"
        with draft.open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        failpoints.hit(BEFORE_MANIFEST)
        try:
            os.link(draft, self._path(manifest.number))
        except FileExistsError:
            return False
        except OSError as error:
            raise SinkUnwritable(
                f"The file system of {self._root} makes no links: {error.strerror}.",
                next_step="Use another file system, or a Delta sink.",
            ) from error
        finally:
            draft.unlink()
        _sync(self._directory)
        failpoints.hit(AFTER_MANIFEST)
        return True

    def move(self, manifest: Manifest) -> None:
        """Move the files of *manifest* to where they are seen; those that were moved before stay."""
        moved = False
        for file in manifest.files:
            failpoints.hit(BEFORE_MOVE)
            try:
                (self._root / file.staged).rename(self._root / file.name)
                moved = True
            except FileNotFoundError:
                if not (self._root / file.name).exists():
                    raise ManifestDamaged(
                        f"The file {file.name}, which manifest {manifest.number} names, is gone.",
                        next_step="Restore it.",
                    ) from None
            failpoints.hit(AFTER_MOVE)
        if moved:
            _sync(self._root)

    def _numbers(self) -> list[int]:
        try:
            names = [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return []
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:020}.json"

    def _read(self, number: int) -> Manifest:
        path = self._path(number)
        return Manifest.from_json(path.read_text(encoding="utf-8"), path)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
