from __future__ import annotations

from typing import Any

from headwater.sources.mongodb.documents.layout import Described, Made

def plan(described: tuple[Described, ...], /) -> Any: ...
def decode(
    plan: Any, data: Any, offsets: Any | None, validity: Any | None, first: int, rows: int, /
) -> tuple[int, list[Made]]: ...
