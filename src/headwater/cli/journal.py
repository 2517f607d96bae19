"""``headwater journal``: look into a journal, follow it, check and repair it, fork and export its segments."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater.cli.journal_export import SECRET_NAMES, export_jsonl, export_markdown, hide, when
from headwater.cli.terminal import err, fail, out
from headwater.errors import InputError, NotFoundError
from headwater.journal.damage import Verification, repair, rescue, verify
from headwater.journal.entry import SEGMENT_START, Entry, Rewound, is_id
from headwater.journal.errors import JournalError, SegmentNotFoundError
from headwater.journal.fork import children, fork_at, origin_of
from headwater.journal.fork import fork as fork_whole
from headwater.journal.fs_store import FsStore
from headwater.journal.retention import prune
from headwater.journal.store import Store

VARIABLE = "HEADWATER_JOURNAL"
DEFAULT_LOCATION = Path(".headwater/journal")


class JournalNotFoundError(JournalError, NotFoundError):
    """There is no journal at this location."""


def default_location() -> Path:
    """`HEADWATER_JOURNAL`, or `.headwater/journal` below the current directory."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_LOCATION)


def open_existing(location: Path) -> FsStore:
    """:raises JournalNotFoundError: *location* is no directory."""
    if not location.is_dir():
        problem = f"There is no journal at {location}."
        if location.exists():
            problem = f"{location} is no journal: a journal is a directory."
        raise JournalNotFoundError(problem, next_step=f"Name one with --root or {VARIABLE}.")
    return FsStore(location)


app = typer.Typer(help="Look inside a journal: what each run did; check, repair, fork, export.", no_args_is_help=True)

Root = Annotated[
    Path,
    typer.Option("--root", envvar=VARIABLE, default_factory=default_location, help="Directory of the journal."),
]
Segment = Annotated[str, typer.Argument(help="Id of the segment, or its beginning or end if that is unique.")]
_NARROW = 70  # columns; below it tables would cut what has to be read
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _resolve(store: Store, text: str) -> tuple[str, str]:
    """The (session, segment) that *text* names."""
    if is_id(text):
        session = store.lookup_session_of(text)
        if session is None:
            raise SegmentNotFoundError("", text, message=f"No session has a segment {text}.")
        return session, text
    found = [
        (session, segment)
        for session in store.list_sessions()
        for segment in store.list_segments(session)
        if text and (segment.startswith(text) or segment.endswith(text))
    ]
    if not found:
        raise SegmentNotFoundError("", text, message=f"No segment begins or ends with `{text}`.")
    if len(found) > 1:
        some = ", ".join(segment for _, segment in found[:3])
        raise InputError(f"`{text}` names {len(found)} segments: {some} …", next_step="Give more of the id.")
    return found[0]


def _when(ms: int | None) -> str:
    return "" if ms is None else when(ms).replace("T", " ").removesuffix("+00:00")


def _plain(value: Any) -> str:
    return str(value)


def _as_json(entry: Entry) -> str:
    fields = {"seq": entry.seq, "ts": entry.ts, "kind": entry.kind, "fields": dict(entry.fields)}
    if entry.key is not None:
        fields["key"] = entry.key
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(fields, ensure_ascii=not unicode)


def printable(text: str) -> str:
    """*text* without characters that steer a terminal: a journal holds what others wrote."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _short(entry: Entry) -> str:
    text = json.dumps(dict(entry.fields), ensure_ascii=False, separators=(", ", ": "))[1:-1]
    return printable(text if len(text) <= 300 else text[:299] + "…")


def entry_line(entry: Entry) -> str:
    """An entry for a person."""
    return f"{entry.seq:>7}  {_when(entry.ts)}  {printable(entry.kind)}  {_short(entry)}"


@app.callback()
def prepare() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter gets its number
            stream.reconfigure(errors="backslashreplace")


@app.command("list")
def list_(
    root: Root,
    session: Annotated[str | None, typer.Argument(help="Only the segments of this session.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many sessions.")] = 20,
    active: Annotated[bool, typer.Option("--active", help="Order by last change instead of creation.")] = False,
    as_json: Json = False,
) -> None:
    """Sessions and their segments, most recent first."""
    rows: list[dict[str, Any]] = []
    with open_existing(root) as store:
        order: Literal["active", "created"] = "active" if active else "created"
        sessions = [session] if session else store.list_sessions(limit=limit, order_by=order)
        for name in sessions:
            for segment in store.list_segments(name, order_by=order):
                row = _row(store, name, segment)
                if row is not None:
                    rows.append(row)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if not rows:
        out.print(f"No segments in {escape(str(root))}.", soft_wrap=True)
        return
    for name, group in itertools.groupby(rows, key=lambda row: row["session"]):
        _print_session(name, list(group))


def _print_session(session: str, rows: list[dict[str, Any]]) -> None:
    pipeline = next((row["pipeline"] for row in rows if row["pipeline"]), None)
    title = f"Session {session}" + (f", pipeline {escape(printable(str(pipeline)))}" if pipeline else "")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column, width in (("segment", 36), ("entries", 7), ("bytes", 5), ("changed (UTC)", 16)):
        # Never cut short: an id has to be copied.
        table.add_column(column, justify="right" if width < 10 else "left", no_wrap=True, min_width=width)
    table.add_column("from", min_width=8)
    for row in rows:
        entries = "[red]damaged[/]" if row["entries"] is None else f"{row['entries']:,}"
        origin = row["origin"]
        parent = "" if origin is None else f"{origin['relation'].partition('_')[0]} {origin['segment'][-8:]}"
        table.add_row(row["segment"], entries, f"{row['bytes']:,}", _when(row["modified_at"])[:16], parent)
    out.print(table)


def _row(store: Store, session: str, segment: str) -> dict[str, Any] | None:
    """What `list` shows of a segment; None when it was deleted meanwhile."""
    row: dict[str, Any] = {"session": session, "segment": segment, "pipeline": None, "origin": None}
    row["entries"] = row["head"] = row["modified_at"] = None
    row["bytes"] = 0
    try:
        with store.source(session, segment) as source:
            row["bytes"] = source.size()
        row["modified_at"] = store.modified_at(session, segment)
        head = store.head(session, segment)
        row["entries"], row["head"] = head.seq, str(head)
        first = next(store.iter(session, segment, limit=1), None)
        if first is not None and first.kind == SEGMENT_START:
            row["pipeline"] = first.fields.get("pipeline")
        origin = origin_of(store, session, segment)
        if origin is not None:
            row["origin"] = {"relation": origin.relation, "segment": origin.segment, "head": str(origin.head)}
    except SegmentNotFoundError:
        return None
    except JournalError as error:
        row["error"] = error.message
    return row


@app.command()
def show(
    root: Root,
    segment: Segment,
    from_seq: Annotated[int, typer.Option("--from", min=1, help="Start at this entry.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 50,
    tail: Annotated[bool, typer.Option("--tail", help="The newest entries instead of the first.")] = False,
    kind: Annotated[str | None, typer.Option(help="Only entries of this kind.")] = None,
    as_json: Json = False,
) -> None:
    """The entries of a segment."""
    with open_existing(root) as store:
        ids = _resolve(store, segment)
        if tail and kind is None:
            from_seq = max(from_seq, store.head(*ids).seq - limit + 1)
        entries = (entry for entry in store.iter(*ids, from_seq=from_seq) if kind is None or entry.kind == kind)
        picked = list(deque(entries, limit) if tail else itertools.islice(entries, limit))
        head = store.head(*ids)
    if as_json:
        for entry in picked:
            typer.echo(_as_json(entry))
        return
    title = f"Segment {ids[1]}, head {head}\nsession {ids[0]}"
    if out.width < _NARROW:
        typer.echo("\n".join((title, *map(entry_line, picked))))
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("seq", "time (UTC)", "kind", "fields"):
        table.add_column(column, justify="right" if column == "seq" else "left", no_wrap=column != "fields")
    for entry in picked:
        table.add_row(str(entry.seq), _when(entry.ts), Text(printable(entry.kind)), Text(_short(entry)))
    out.print(table)


@app.command()
def follow(
    root: Root,
    segment: Segment,
    from_seq: Annotated[int | None, typer.Option("--from", min=1, help="Start at this entry.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Only what comes from now on.")] = False,
    as_json: Json = False,
) -> None:
    """Print entries as they come, until Ctrl-C."""
    with open_existing(root) as store:
        ids = _resolve(store, segment)
        start = from_seq or (store.head(*ids).seq + 1 if new else 1)
        for news in store.follow(*ids, from_seq=start):
            if isinstance(news, Rewound):
                line = json.dumps({"rewound_to": news.seq}) if as_json else f"-- truncated to entry {news.seq} --"
            elif as_json:
                line = _as_json(news)
            else:
                line = entry_line(news)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


@app.command("verify")
def verify_(
    root: Root,
    segment: Annotated[str | None, typer.Argument(help="One segment; all of the journal when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Check every byte. Exit code 1 when something is damaged."""
    found: list[tuple[str, Verification]] = []
    failed: list[tuple[str, JournalError]] = []
    with open_existing(root) as store:
        if segment is not None:
            ids = _resolve(store, segment)
            found.append((ids[1], verify(store, *ids)))
        else:
            for ids in [(s, g) for s in store.list_sessions() for g in store.list_segments(s)]:
                try:
                    found.append((ids[1], verify(store, *ids)))
                except SegmentNotFoundError:  # deleted meanwhile
                    continue
                except JournalError as error:  # one that cannot be read does not hide the others
                    failed.append((ids[1], error))
    if as_json:
        plain = [{"segment": name, "ok": seen.ok, **asdict(seen), "head": str(seen.head)} for name, seen in found]
        plain += [{"segment": name, "ok": False, "error": reason.message} for name, reason in failed]
        typer.echo(json.dumps(plain, default=_plain))
    else:
        _print_verifications(found)
        for _, reason in failed:
            fail(reason)
    if failed or any(not seen.ok for _, seen in found):
        raise typer.Exit(1)


def _print_verifications(found: list[tuple[str, Verification]]) -> None:
    table = Table(title="Verified", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("segment", "good entries", "bytes", "torn", "damage"):
        width = 36 if column == "segment" else None  # never cut short: an id has to be copied
        table.add_column(column, no_wrap=bool(width), min_width=width, justify="left" if column[0] in "sd" else "right")
    for name, seen in found:
        damage = "[green]none[/]"
        if seen.damages:
            first = seen.damages[0]
            more = f" and {seen.damage_count - 1:,} more" if seen.damage_count > 1 else ""
            damage = f"[red]line {first.line} (byte {first.offset}): {escape(first.reason)}{more}[/]"
        table.add_row(name, f"{seen.head.seq:,}", f"{seen.size:,}", f"{seen.torn_bytes:,}", damage)
    out.print(table)
    for name, seen in found:
        if not seen.ok:
            err.print(f"next: headwater journal repair {name}", soft_wrap=True)


@app.command("repair")
def repair_(
    root: Root,
    segment: Segment,
    rescue_rest: Annotated[
        bool, typer.Option("--rescue", help="First put all that is readable, also behind the damage, in a new segment.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Keep the good beginning of a damaged segment; the other bytes are moved aside, never deleted."""
    with open_existing(root) as store:
        ids = _resolve(store, segment)
        rescued: dict[str, Any] | None = None
        if rescue_rest:
            branch, seen = rescue(store, *ids)
            rescued = {"segment": branch.segment, "entries": seen.entries, "unverified": seen.unverified}
        done = repair(store, *ids)
    if as_json:
        plain = {"segment": ids[1], "head": str(done.head), "quarantined": done.quarantined, "bytes": done.bytes}
        typer.echo(json.dumps({**plain, "rescued": rescued}))
        return
    if rescued is not None:
        out.print(f"rescued {rescued['entries']} entries into segment {rescued['segment']}", soft_wrap=True)
    if done.quarantined is None:
        out.print(f"nothing to repair: {done.head.seq} good entries", soft_wrap=True)
    else:
        out.print(f"kept {done.head.seq} good entries", soft_wrap=True)
        out.print(f"moved {done.bytes} bytes to {escape(done.quarantined)}", soft_wrap=True)


@app.command()
def fork(
    root: Root,
    segment: Segment,
    at: Annotated[
        int | None,
        typer.Option("--at", min=0, help="Go on after this entry, in the same session. Without it: a new session."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A new segment that goes on from a moment of another, which stays as it is."""
    with open_existing(root) as store:
        ids = _resolve(store, segment)
        branch = fork_whole(store, *ids) if at is None else fork_at(store, *ids, at)
        family = len(children(store, *ids))
    if as_json:
        plain = {"session": branch.session, "segment": branch.segment, "head": str(branch.head), "parent": ids[1]}
        typer.echo(json.dumps(plain))
        return
    out.print(f"segment {branch.segment} of session {branch.session}", soft_wrap=True)
    out.print(f"forked from {ids[1]}, which has {family} children now", soft_wrap=True)


@app.command("export")
def export_(
    root: Root,
    segment: Segment,
    form: Annotated[Literal["jsonl", "markdown"], typer.Option("--format", help="For machines or people.")] = "jsonl",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A new file; stdout when left out.")] = None,
    hidden: Annotated[list[str] | None, typer.Option("--hide", help="Also hide fields named like this.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Hide nothing, not even passwords.")] = False,
) -> None:
    """Write a segment's entries for use elsewhere; secrets are hidden."""
    with open_existing(root) as store:
        ids = _resolve(store, segment)
        entries = store.iter(*ids)
        if not raw:
            entries = map(hide((*SECRET_NAMES, *(hidden or ()))), entries)
        lines = export_jsonl(entries)
        if form == "markdown":
            title = f"# Segment {ids[1]}\n\nSession {ids[0]}\n"
            lines = itertools.chain([title], export_markdown(entries))
        if output is None:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")
            for line in lines:
                sys.stdout.write(line)
            return
        _write(output, lines)


def _write(output: Path, lines: Iterable[str]) -> None:
    """A new private file, whole or not at all."""
    try:
        with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            try:
                file.writelines(lines)
                file.flush()
            except BaseException:
                output.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise InputError(f"{output} exists already.", next_step="Name another file.") from None
    except OSError as error:
        raise InputError(f"Cannot write {output}: {error.strerror}.", next_step="Name another file.") from None


@app.command("prune")
def prune_(
    root: Root,
    days: Annotated[float, typer.Option("--older-than", min=0, max=1e6, help="Days without a change.")],
    keep: Annotated[int, typer.Option(min=0, help="The most recently active sessions that stay in any case.")] = 0,
    delete: Annotated[bool, typer.Option("--delete", help="Really delete; without it this only looks.")] = False,
    as_json: Json = False,
) -> None:
    """Delete sessions that nobody changed for long. Only looks, unless told to delete."""
    with open_existing(root) as store:
        now = time.time_ns() // 1_000_000
        judged = prune(store, older_than_ms=int(days * 86_400_000), now=now, keep_newest=keep, dry_run=not delete)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in judged]))
        return
    title = "Pruned" if delete else "Would be pruned: add --delete"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column, width in (("session", 36), ("last change (UTC)", 16), ("verdict", 8)):
        table.add_column(column, no_wrap=True, min_width=width)
    for one in judged:
        table.add_row(one.session, _when(one.modified_at)[:16], one.verdict)
    out.print(table)
