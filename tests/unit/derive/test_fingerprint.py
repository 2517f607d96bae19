"""What of a function counts as the function: code, what it uses in its folder; not comments, lines or libraries."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headwater.derive.derivation import Derivation, load_function
from headwater.derive.errors import InvalidDerivation
from headwater.derive.fingerprint import comparable, fingerprint

FUNCTION = """
from functools import lru_cache
from fingerprinted_rules import least
import fingerprinted_rules as rules
RATES = {"a": 1}
def helper(rows):
    return rows.where("amount > 1")
@lru_cache
def plus(x):
    return x + 1
class Limits:
    least = 4
    def most(self):
        return 9
def made(orders, factor=2):
    plus("x"), Limits().most()
    return helper(orders).select(least("x"), rules.most, RATES["a"], len({"p", "q", "r"}), factor)
"""
RULES = "most = 5\nunused = 1\ndef least(x):\n    return min(x, 0)\n"
ASK = """
import sys
from headwater.derive.fingerprint import fingerprint
sys.path.insert(0, sys.argv[1])
print(fingerprint(__import__(sys.argv[2]).made, ["public.orders"]))
"""
_numbers = itertools.count()


def written(folder: Path, views: str, rules: str) -> str:
    """A module of views, and the one that it uses; its name."""
    number = next(_numbers)
    (folder / f"fingerprinted_rules_{number}.py").write_text(rules)
    (folder / f"fingerprinted_views_{number}.py").write_text(views.replace("_rules", f"_rules_{number}"))
    return f"fingerprinted_views_{number}"


def told_of(folder: Path, views: str, rules: str = RULES) -> str:
    module = written(folder, views, rules)
    return fingerprint(load_function("d", f"{module}:made", folder), ["public.orders"])


def told_elsewhere(folder: Path, views: str, rules: str) -> str:
    """In a process of its own."""
    command = [sys.executable, "-B", "-c", ASK, str(folder), written(folder, views, rules)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_comments_docstrings_and_places_do_not_count_and_every_process_finds_the_same(tmp_path: Path) -> None:
    first = told_of(tmp_path, FUNCTION)
    told = FUNCTION.replace("factor=2):", 'factor=2):\n    """What it is."""\n    # why')
    assert told_of(tmp_path, "\n\n" + told, RULES.replace("unused = 1", "unused = 2")) == first
    assert told_elsewhere(tmp_path, told, RULES) == first


@pytest.mark.parametrize(
    ("views", "rules"),
    [
        (FUNCTION.replace("factor)", "factor + 1)"), RULES),
        (FUNCTION.replace("factor=2", "factor=3"), RULES),
        (FUNCTION.replace("amount > 1", "amount > 2"), RULES),
        (FUNCTION.replace('{"a": 1}', '{"a": 2}'), RULES),
        (FUNCTION.replace("x + 1", "x + 2"), RULES),
        (FUNCTION.replace("return 9", "return 8"), RULES),
        (FUNCTION.replace("least = 4", "least = 3"), RULES),
        (FUNCTION, RULES.replace("most = 5", "most = 6")),
        (FUNCTION, RULES.replace("min(x, 0)", "max(x, 0)")),
    ],
    ids=[
        "code",
        "default",
        "helper",
        "value",
        "decorated",
        "method",
        "attribute",
        "value beside it",
        "function beside it",
    ],
)
def test_an_edit_of_the_function_or_of_what_it_uses_counts(tmp_path: Path, views: str, rules: str) -> None:
    assert told_of(tmp_path, views, rules) != told_of(tmp_path, FUNCTION)


def _scaled(factor: int) -> Any:
    return lambda rows: [row * factor for row in rows]


def test_what_a_function_closes_over_is_given_and_reads_counts() -> None:
    def told(function: Any, tables: str = "a") -> str:
        return fingerprint(function, [tables])

    assert told(_scaled(2)) == told(_scaled(2)) != told(_scaled(3))
    assert told(partial(max, 1)) != told(partial(max, 2))
    assert told(_scaled(2), "a") != told(_scaled(2), "b")
    ring: list[Any] = []
    ring.append(ring)
    assert told(partial(max, ring)) == told(partial(max, ring))


def test_another_version_of_python_cannot_tell() -> None:
    assert comparable("cpython-311:aa", "cpython-311:bb")
    assert not comparable("cpython-311:aa", "cpython-312:aa")


def test_a_module_that_was_edited_is_loaded_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "edited_views_of_this_test.py"
    derivation = Derivation.of("d", "edited_views_of_this_test:made", ["a"], ["id"])
    file.write_text("def help():\n    return 1\ndef made(orders):\n    return help()\n")
    running = derivation.load(tmp_path)
    assert derivation.load(tmp_path) is running
    file.write_text("def made(orders:\n")
    os.utime(file, (1, 1))
    with pytest.raises(InvalidDerivation, match=r"cannot be imported: SyntaxError: .*beside pipeline.toml"):
        derivation.load(tmp_path)
    file.write_text("def help():\n    return 20\ndef made(orders):\n    return help()\n")
    os.utime(file, (9, 9))
    assert load_function("d", "edited_views_of_this_test:made", tmp_path)(None) == 20
    assert running(None) == 1, "one that runs goes on with what it had"
