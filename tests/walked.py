"""Walk: records which functions of the product are entered, in this thread and in those that begin later.

Nothing is replaced: the interpreter reports each call (:func:`sys.setprofile`).
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Function = tuple[str, CodeType]
_GENERATED = "<string>"
"""The file of what `dataclass` generates: no line of a module runs when a value is created."""


class Walk:
    """What is entered while :meth:`recording`.

    :param upkeep: functions, as module and name, that are left out with everything that is called inside.
    """

    def __init__(self, upkeep: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._upkeep, self._is_on = upkeep, False
        self._thread = threading.local()
        self._functions: dict[Function, dict[str, Any]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        left_out = getattr(self._thread, "left_out", None)
        if event == "return":
            if frame is left_out:
                self._thread.left_out = None
            return
        if event != "call" or left_out is not None:
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("headwater"):
            return
        if (module, frame.f_code.co_name) in self._upkeep:
            self._thread.left_out = frame
        elif self._is_on and frame.f_code.co_filename != _GENERATED:
            self._functions.setdefault((module, frame.f_code), frame.f_globals)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Threads that begin inside are recorded for as long as they live."""
        before = sys.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    @property
    def modules(self) -> list[str]:
        return sorted({module for module, _ in self._functions})

    @property
    def functions(self) -> set[str]:
        """The qualified names, without modules: ``Class.method`` or ``function``."""
        return {code.co_qualname for _, code in self._functions}

    @property
    def forwarding(self) -> list[str]:
        """The functions whose whole body is one call of a function of the product with their own arguments."""
        return sorted(
            f"{module}.{code.co_qualname}"
            for (module, code), names in self._functions.items()
            if _forwards(_definitions(code.co_filename).get((code.co_firstlineno, code.co_name)), names)
        )


@cache
def _definitions(path: str) -> dict[tuple[int, str], ast.FunctionDef]:
    """The functions of a file, by where they begin."""
    return {
        (min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.name): node
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def _forwards(node: ast.FunctionDef | None, names: dict[str, Any]) -> bool:
    """Whether the body of *node*, in a module that has *names*, only forwards. Special methods are required as such."""
    if node is None or (node.name.startswith("__") and node.name.endswith("__")):
        return False
    body = [step for step in node.body if not (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or not isinstance(body[0].value, ast.Call):
        return False
    call, given = body[0].value, node.args
    own = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    own += [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
    passed: list[str] = []
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        value = argument.value if isinstance(argument, ast.Starred) else argument
        if not isinstance(value, ast.Name):
            return False
        passed.append(value.id)
    if sorted(passed) != sorted(name for name in own if name not in ("self", "cls")):
        return False
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or root.id in passed:
        return False
    if root.id in ("self", "cls"):
        return True
    target = names.get(root.id)
    module = getattr(target, "__module__", None) or getattr(target, "__name__", "")
    return str(module).startswith("headwater") and not isinstance(target, type)
