"""Old sessions go: which, and why the others stay. Looking is the default; deleting is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater import failpoints
from headwater.errors import InputError
from headwater.journal.store import Store
from headwater.system.owner_lock import OwnedElsewhereError

BETWEEN = failpoints.register("journal.prune.before_session")

Verdict = Literal["expired", "recent", "among the newest", "owned", "deleted"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A session and what `prune` thinks of it; only `expired` becomes `deleted`."""

    session: str
    modified_at: int
    segments: int
    verdict: Verdict


def prune(
    store: Store,
    *,
    older_than_ms: int,
    now: int,
    keep_newest: int = 0,
    dry_run: bool = True,
) -> list[Judged]:
    """Judge all sessions, oldest activity first, and delete the expired ones unless *dry_run*.

    :param older_than_ms: a session expires when it was not changed for so long.
    :param keep_newest: so many of the most recently active stay in any case.
    """
    if older_than_ms < 0 or keep_newest < 0:
        raise InputError(f"Received older_than_ms={older_than_ms}, keep_newest={keep_newest}; valid is 0 or more.")
    judged = []
    for place, session in enumerate(store.list_sessions(order_by="active")):
        modified = store.session_modified_at(session) or 0
        verdict: Verdict = "expired"
        if place < keep_newest:
            verdict = "among the newest"
        elif now - modified < older_than_ms:
            verdict = "recent"
        if verdict == "expired":
            verdict = _delete(store, session, modified, dry_run)
        judged.append(Judged(session, modified, len(store.list_segments(session)), verdict))
    return judged[::-1]


def _delete(store: Store, session: str, modified: int, dry_run: bool) -> Verdict:
    """Delete, as its owner, when nothing was written since the judgement."""
    if dry_run:
        return "expired" if store.owner(session) is None else "owned"
    try:
        with store.own(session):
            failpoints.hit(BETWEEN)
            return "deleted" if store.delete_session(session, modified_at=modified) else "recent"
    except OwnedElsewhereError:
        return "owned"
