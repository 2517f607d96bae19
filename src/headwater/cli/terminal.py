"""How commands speak to a person: one console for tables, one for errors."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from headwater.errors import HeadwaterError

out = Console()
err = Console(stderr=True)


def amount(size: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def fail(error: HeadwaterError) -> None:
    """Print *error* for a person: what happened, then the next step."""
    err.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.next_step:
        err.print(Text.assemble((" next: ", "bold cyan"), error.next_step), soft_wrap=True)
