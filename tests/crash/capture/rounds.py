"""Lives of a capture under live writers, each ended by ``kill -9``: at a durable step, or at random.

``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it many rounds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.shop import Shop, Writer, verify
from tests.sampled import SOAK

from headwater.capture import session as capture_session
from headwater.log_store import sealer

STEPS = (
    # failpoint, and which time it is passed
    (capture_session.AFTER_BEGIN, 1),
    (sealer.BEFORE_SEAL, 3),
    (sealer.AFTER_SEAL, 3),
    (capture_session.BEFORE_ACKNOWLEDGE, 2),
)


class Victim(Protocol):
    """What can be killed and started again: a capture, a server."""

    def kill9(self) -> None: ...

    def start(self) -> None: ...


class Writing(Protocol):
    """A thread that writes until it is ended."""

    def start(self) -> None: ...

    def end(self) -> None: ...


def seeded() -> tuple[str, random.Random]:
    """The seed of this run, printed, and what is drawn from it."""
    seed = os.environ.get("HEADWATER_SEED") or str(time.time_ns())
    print(f"HEADWATER_SEED={seed}")
    return seed, random.Random(seed)


def some_steps(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """So many of the steps in their order; in a soak all of them, if any."""
    chosen = rng.sample(STEPS, len(STEPS) if SOAK and count else count)
    return [one for one in STEPS if one in chosen]


class Rounds:
    """The lives of *capture*; *writers* write from the first position that it holds."""

    def __init__(self, capture: CaptureProcess, writers: Sequence[Writing], rng: random.Random) -> None:
        self._capture, self._writers, self._rng = capture, writers, rng
        self._writing = False

    def _write(self) -> None:
        if not self._writing:
            for writer in self._writers:
                writer.start()
        self._writing = True

    def die_at(self, steps: Iterable[tuple[str, int]]) -> None:
        """One life to each of the steps."""
        for step, hit in steps:
            self._capture.start(armed=f"{step}=kill@{hit}")
            self._capture.wait_until_it_reads()
            if self._capture.offset() is not None:
                self._write()
            self._capture.killed_by_failpoint()

    def die_at_random(
        self,
        rounds: int,
        victims: Callable[[], Sequence[Victim]],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """So many *rounds*, each of which kills *victims*; *meanwhile* happens when the servers are there again."""
        self._capture.start()
        for _ in range(rounds):
            if not self._writing or self._rng.random() < 0.7:
                self._capture.wait_until_it_reads()
            self._write()
            time.sleep(self._rng.uniform(0.0, 1.0))
            killed = victims()
            for victim in killed:
                victim.kill9()
            for victim in killed:
                if victim is not self._capture:
                    victim.start()
            meanwhile()
            if self._capture in killed:
                self._capture.start()

    def end(self) -> None:
        """The writers end, the capture comes to the end of what they wrote, and is stopped."""
        for writer in self._writers:
            writer.end()
        self._capture.catch_up()
        self._capture.stop()


def assert_exactly_once(
    shop: Shop,
    capture: CaptureProcess,
    victims: Sequence[Sequence[Victim]],
    *,
    steps: int = 0,
    rounds: int,
    meanwhile: Callable[[random.Random], object] = lambda rng: None,
) -> None:
    """Two writers in the *shop*; its capture is killed at as many of the steps as *steps* says, or at all in a soak.

    Then it goes on for so many *rounds*, each of which kills one group of *victims*.

    :raises AssertionError: a change is missing, came twice or out of its transaction, or the capture complained.
    """
    seed, rng = seeded()
    shop.make_tables()
    writers = [Writer(shop, f"{seed} {number}") for number in range(2)]
    lives = Rounds(capture, writers, rng)
    try:
        lives.die_at(some_steps(rng, steps))
        lives.die_at_random(rounds, lambda: rng.choice(victims), lambda: meanwhile(rng))
        wait_for(lambda: sum(len(writer.confirmed) for writer in writers) > 20, "transactions")
        lives.end()
        confirmed = [number for writer in writers for number in writer.confirmed]
        assert verify(shop, capture.store, confirmed) > 20
        assert capture.said == ""
    finally:
        capture.close()
