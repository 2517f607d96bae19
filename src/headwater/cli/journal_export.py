"""A segment for reading elsewhere: JSON Lines or Markdown, entry by entry; secrets are hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from headwater.journal.entry import Entry

SECRET_NAMES = ("password", "passwd", "secret", "token", "api_key", "apikey", "credential", "private_key")
HIDDEN = "[hidden]"
_USERINFO = re.compile(r"(?<=://)[^/\s]+@")


def hide(names: Iterable[str] = SECRET_NAMES) -> Callable[[Entry], Entry]:
    """A function that hides the values of all fields, at any depth, whose name contains one of *names*,
    user names and passwords inside URLs, and `name=value` with such a name inside texts."""
    wanted = tuple(name.lower() for name in names)
    pairs = re.compile(rf"(\w*(?:{'|'.join(map(re.escape, wanted))})\w*\s*=\s*)('[^']*'|\"[^\"]*\"|[^\s&;,]+)", re.I)

    def clean_text(text: str) -> str:
        text = _USERINFO.sub(f"{HIDDEN}@", text)
        return pairs.sub(rf"\1{HIDDEN}", text) if wanted else text

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: HIDDEN if any(word in name.lower() for word in wanted) else clean(item)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [clean(item) for item in value]
        return clean_text(value) if isinstance(value, str) else value

    return lambda entry: replace(entry, fields=clean(dict(entry.fields)))


def when(ms: int | None) -> str:
    """A time of an entry for people: it may be any number, also one that no calendar has."""
    try:
        return datetime.fromtimestamp((ms or 0) / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def export_jsonl(entries: Iterable[Entry]) -> Iterator[str]:
    """One JSON object per entry, without checksum (a redacted line has no valid one)."""
    for entry in entries:
        shown = {"seq": entry.seq, "ts": entry.ts, "kind": entry.kind, **entry.fields}
        yield json.dumps(shown, ensure_ascii=False, separators=(",", ":")) + "\n"


def export_markdown(entries: Iterable[Entry]) -> Iterator[str]:
    """For people: one heading per entry, its fields as a JSON block."""
    for entry in entries:
        yield f"\n## {entry.seq} · {entry.kind}\n\n{when(entry.ts)}\n"
        if entry.fields:
            body = json.dumps(dict(entry.fields), ensure_ascii=False, indent=2)
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", body)), default=0))
            yield f"\n{fence}json\n{body}\n{fence}\n"
