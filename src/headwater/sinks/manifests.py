"""Manifests: which files a directory of Parquet files has, in the order in which batches brought them.

``_headwater/<number>.json`` is one commit: the files of a batch, or small files joined to larger ones, which they
replace; and, for every query that ever delivered here, how far it came. Each number is given once
(:mod:`headwater.versioned.numbered_files`), so the newest manifest shows what is committed, and of two processes that
commit the same batch one finds that the other was faster.
Now and then a manifest has all files, so that those before it are not needed.

A file waits in ``_staging`` until its manifest is there, then it is moved to where readers see it; files that it
replaces are moved to ``_replaced`` before. The next process moves what a process that died left behind.
docs/formats/manifest.md has the format.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from headwater import failpoints
from headwater.errors import CorruptionError
from headwater.sinks.errors import SinkError, SinkUnwritable
from headwater.sinks.sink import Committed
from headwater.system.files import make_private, sync
from headwater.versioned.numbered_files import NoLinks, NumberedFiles

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


DIRECTORY: Final = "_headwater"
STAGING: Final = "_staging"
REPLACED: Final = "_replaced"
CHECKPOINT_MANIFESTS: Final = 32
"""One in so many has all files."""
READ_ATTEMPTS: Final = 5

BEFORE_MANIFEST = failpoints.register("sink.parquet.before_manifest")
AFTER_MANIFEST = failpoints.register("sink.parquet.after_manifest")
BEFORE_HIDE = failpoints.register("sink.parquet.before_hide")
AFTER_HIDE = failpoints.register("sink.parquet.after_hide")
BEFORE_MOVE = failpoints.register("sink.parquet.before_move")
AFTER_MOVE = failpoints.register("sink.parquet.after_move")
BEFORE_FORGET = failpoints.register("sink.parquet.before_forget")
AFTER_FORGET = failpoints.register("sink.parquet.after_forget")


class Manifests:
    """The manifests of the directory *root* of one table. :param is_private: only this user can read them."""

    def __init__(self, root: Path, *, is_private: bool = False) -> None:
        self._root, self._is_private = root, is_private
        self._numbered = NumberedFiles(root / DIRECTORY, is_private=is_private)

    def newest(self) -> Manifest:
        """The newest one; number 0 if there is none. What its process did not move is moved."""
        before: Manifest | None = None
        while True:
            numbers = self._numbered.numbers()
            found = self._read(max(numbers)) if numbers else Manifest()
            try:
                self.settle(found)
                return found
            except ManifestDamaged:  # or others went on meanwhile, and replaced its files
                if found == before:
                    raise
                before = found

    def all(self) -> list[Manifest]:
        """Those from the newest on that has all files, in order.

        :raises ManifestDamaged: one is gone.
        """
        for _ in range(READ_ATTEMPTS):
            found: list[Manifest] = []
            try:
                for number in range(max(self._numbered.numbers(), default=0), 0, -1):
                    found.append(self._read(number))
                    if found[-1].all is not None:
                        break
                return found[::-1]
            except FileNotFoundError:  # forgotten while it was read: there is a newer one that has all
                continue
        raise ManifestDamaged(f"Manifests of {self._root} are gone.", next_step="Restore the directory _headwater.")

    def files(self) -> tuple[ManifestFile, ...]:
        """All committed files, in the order of their batches."""
        files: tuple[ManifestFile, ...] = ()
        for manifest in self.all():
            files = manifest.after(files) if manifest.all is None else manifest.all
        return files

    def place(self, file: ManifestFile) -> Path:
        """Where a committed file is now. :raises ManifestDamaged: it is gone."""
        names = [file.name, f"{REPLACED}/{file.name}", *([file.staged] if file.staged else [])]
        for _ in range(READ_ATTEMPTS):
            for name in names:
                if (self._root / name).exists():
                    return self._root / name
        raise ManifestDamaged(
            f"The file {file.name} is gone: it was removed, or joined to others longer ago than files are kept.",
            next_step="Read the directory again; if it is still missing, restore it.",
        )

    def put(self, manifest: Manifest) -> bool:
        """Commit; ``False``: its number is taken, and nothing is changed."""
        if manifest.all is None and manifest.number % CHECKPOINT_MANIFESTS == 0:
            manifest = self.complete(manifest)
        for parent in {(self._root / file.staged).parent for file in manifest.files}:
            if parent.exists():
                sync(parent)
        try:
            is_put = self._numbered.put(
                manifest.number,
                manifest.to_json(),
                lambda: failpoints.hit(BEFORE_MANIFEST),
                lambda following: self._read(following).parent in ("", manifest.id),
            )
        except NoLinks as error:
            raise SinkUnwritable(
                f"The file system of {self._root} makes no links: {error.strerror}.",
                next_step="Use another file system, or a Delta sink.",
            ) from error
        if is_put:
            failpoints.hit(AFTER_MANIFEST)
        return is_put

    def complete(self, manifest: Manifest) -> Manifest:
        """*manifest*, which is the next one, with all files."""
        before = [replace(file, staged="") for file in self.files()]
        return replace(manifest, all=manifest.after(before))

    def settle(self, manifest: Manifest) -> None:
        """Move what *manifest* replaces to where it is not seen, then its files to where they are.

        In this order, so that nobody who looks at the directory sees a row twice.
        """
        touched: set[Path] = set()
        for name in manifest.removed:
            failpoints.hit(BEFORE_HIDE)
            hidden = self._root / REPLACED / name
            if self._move(self._root / name, hidden):
                touched.add((self._root / name).parent)
                with suppress(FileNotFoundError):  # removed already
                    os.utime(hidden)  # it is kept from now on
            failpoints.hit(AFTER_HIDE)
        for directory in touched:
            sync(directory)
        touched = set()
        for file in manifest.files:
            failpoints.hit(BEFORE_MOVE)
            if self._move(self._root / file.staged, self._root / file.name):
                touched |= {(self._root / file.name).parent, self._root}
            else:
                self.place(file)
            failpoints.hit(AFTER_MOVE)
        for directory in touched:
            sync(directory)

    def forget(self, retention_seconds: float) -> None:
        """Remove what nobody needs who began to read less than *retention_seconds* ago. Nothing depends on it."""
        failpoints.hit(BEFORE_FORGET)
        before = time.time() - retention_seconds
        with suppress(FileNotFoundError):  # another process does the same
            for path in list((self._root / REPLACED).rglob("*.parquet")):
                if path.stat().st_mtime <= before:
                    path.unlink()
            is_needed = True
            for number in sorted(self._numbered.numbers(), reverse=True):
                path = self._numbered.path(number)
                if not is_needed:
                    path.unlink()
                elif path.stat().st_mtime <= before and self._read(number).all is not None:
                    is_needed = False
        failpoints.hit(AFTER_FORGET)

    def _read(self, number: int) -> Manifest:
        path = self._numbered.path(number)
        return Manifest.from_json(path.read_text(encoding="utf-8"), path)

    def _move(self, old: Path, new: Path) -> bool:
        """``False``: it is not there."""
        for _ in range(2):
            try:
                old.rename(new)
                return True
            except FileNotFoundError:
                if not old.exists():
                    break
                if self._is_private:
                    make_private(new.parent)
                new.parent.mkdir(parents=True, exist_ok=True)
        return False
