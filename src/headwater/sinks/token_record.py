"""TokenRecord: what a sink has of a table from one query, as a text that the sink keeps under one key. Pure.

``{"version":1,"epoch":7,"history":{"<backfill>":[plan,attempt]},"generation":2}``; of the backfills the newest few are
kept: plans of those of before are asked for by nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from headwater.sinks.sink import Committed, Token

VERSION: Final = 1
KEPT_BACKFILLS: Final = 4


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """:ivar history: by backfill, plan and attempt; the newest is the last. :ivar generation: of who wrote it."""

    epoch: int = 0
    history: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    generation: int = 0

    @classmethod
    def of_text(cls, text: str | bytes | None) -> Self:
        """The record that :attr:`text` was made of; nothing is an empty one."""
        if not text:
            return cls()
        value = json.loads(text)
        history = {backfill: (int(plan), int(attempt)) for backfill, (plan, attempt) in value["history"].items()}
        return cls(int(value["epoch"]), history, int(value["generation"]))

    @property
    def text(self) -> str:
        value = {"version": VERSION, "epoch": self.epoch, "history": self.history, "generation": self.generation}
        return json.dumps(value, separators=(",", ":"))

    def committed(self, backfill: str) -> Committed:
        return Committed(self.epoch, *self.history.get(backfill, (0, 0)))

    def following(self, token: Token, after: Committed) -> TokenRecord:
        """The record once the sink has *after*."""
        others = {backfill: at for backfill, at in self.history.items() if backfill != token.backfill}
        of_this = {token.backfill: (after.plan, after.attempt)} if after.plan else {}
        kept = dict(list({**others, **of_this}.items())[-KEPT_BACKFILLS:])
        return TokenRecord(after.epoch, kept, max(self.generation, token.generation))
