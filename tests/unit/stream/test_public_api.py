"""The package is one small door: everything public is there, and behind it is no I/O."""

from __future__ import annotations

import ast
from pathlib import Path

from headwater import stream
from headwater.errors import InputError


def test_every_public_name_is_there_and_documented() -> None:
    for name in stream.__all__:
        value = getattr(stream, name)
        if isinstance(value, type):
            assert value.__doc__


def test_every_error_says_that_the_input_must_be_fixed() -> None:
    errors = [getattr(stream, name) for name in stream.__all__ if name.endswith("Error")]
    assert len(errors) == 9
    assert all(issubclass(error, InputError) for error in errors)


def test_no_module_imports_anything_that_touches_the_world() -> None:
    world = {"os", "io", "pathlib", "socket", "subprocess", "threading", "time", "random", "sqlite3", "pyspark"}
    for module in Path(str(stream.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert world.isdisjoint(alias.name.partition(".")[0] for alias in node.names), module
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in world, module
