"""Every command that a text of ours advises exists, with the options that it is given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import headwater
from headwater.cli.main import app

SOURCES = Path(headwater.__file__).parent
COMMAND = re.compile(r"\bheadwater ([a-z][a-z-]*)([^.;&`()\n]*)")
VALUE = "VALUE"


def texts() -> Iterator[tuple[str, str]]:
    """The place and text of every string that is not a docstring; what is formatted into it is ``VALUE``."""
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in docs | inner:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(SOURCES)}:{node.lineno}", node.value


ADVISED = sorted({(where, found[1], found[2]) for where, text in texts() for found in COMMAND.finditer(text)})


def problem(name: str, rest: str) -> str | None:
    """Why the command *name* with what follows it cannot be run."""
    words = rest.split()
    command: Any = typer.main.get_command(app)
    command = command.get_command(None, name)
    if hasattr(command, "commands") and words:
        command = command.commands.get(words.pop(0))
    if command is None:
        return "no such command"
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"no such option: {', '.join(unknown)}" if unknown else None


def test_every_advised_command_exists_with_its_options() -> None:
    found = [(where, name, rest, problem(name, rest)) for where, name, rest in ADVISED]
    assert [one for one in found if one[3] is not None] == []
    assert len(found) > 100


def test_a_command_or_option_that_does_not_exist_is_found() -> None:
    assert problem("resnapshot", " public.t --column note") is None
    assert problem("sink", " retry delta") is None
    assert problem("sink", " repair delta") == "no such command"
    assert problem("repair", " delta") == "no such command"
    assert problem("run", " --special-values a=b") == "no such option: --special-values"
