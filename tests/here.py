"""Here: the jobs of a delivery loop, run in this process, one after the other, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Here:
    """Inputs and results are pickled, as on their way through Spark."""

    def __init__(self, parallelism: int = 2) -> None:
        self._parallelism = parallelism

    @property
    def parallelism(self) -> int:
        return self._parallelism

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        travelled: list[T] = pickle.loads(pickle.dumps(list(inputs)))
        result: list[R] = pickle.loads(pickle.dumps([function(value) for value in travelled]))
        return result
