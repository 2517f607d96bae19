"""What other threads ask of a sink that runs: to stop, to use other settings, to let go of its vnodes.

A sink looks between two items, so a request waits for the write that is under way. :meth:`SinkControl.sleep` ends early
when something is asked: give it to the reader of the log as well, or a rewind holds up a stop for minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

from headwater.sinks.errors import HandOverTimeout
from headwater.stream import Epoch


def changed_settings(old: Mapping[str, str], given: Mapping[str, str | None]) -> frozenset[str]:
    """The names whose values *given* changes: those with another value than in *old*; ``None`` takes one away."""
    return frozenset(name for name, value in given.items() if old.get(name) != value)


class SinkControl:
    """The requests to one sink, and its settings.

    :param settings: as the sink is built with; they may hold passwords and are never shown.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = dict(settings or {})
        self._changed = threading.Condition()
        self._stop = False
        self._update = False
        self._move_asked = self._move_released = Epoch(0)
        self._ended = False

    def __repr__(self) -> str:
        return f"SinkControl({', '.join(sorted(self._settings))})"

    # -- any thread --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End after the write that is under way; what is not committed stays in the log."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def update(self, settings: Mapping[str, str | None]) -> frozenset[str]:
        """Use these settings beside the others, ``None`` to take one away. Returns the names that really change.

        If none does, the sink goes on as if nothing was said. Otherwise it is built anew, and the log rewound once.
        """
        with self._changed:
            names = changed_settings(self._settings, settings)
            if names:
                merged = {**self._settings, **settings}
                self._settings = {name: value for name, value in merged.items() if value is not None}
                self._update = True
                self._changed.notify_all()
            return names

    def hand_over(self, epoch: Epoch, timeout: float | None = None) -> None:
        """Let the sink let go of its log: call it after the barrier with new vnodes was written, before ``finish``.

        From then on until the flush is finished the sink reads nothing: it waits for the new vnodes.

        :param epoch: the epoch that the barrier ended.
        :raises HandOverTimeout: it did not let go in time. Ask again: a flush that is finished before lets the new
            owner of a vnode deliver again what this sink had not committed.
        """
        with self._changed:
            self._move_asked = max(self._move_asked, epoch)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended or self._move_released >= epoch, timeout):
                raise HandOverTimeout(
                    f"The sink did not let go of its log in {timeout:g} s: a write is under way.",
                    next_step="Look at what the sink writes, then hand over again.",
                )

    def sleep(self, seconds: float) -> None:
        """Sleep until something is asked, at most *seconds*."""
        with self._changed:
            self._changed.wait_for(self._is_asked, seconds)

    # -- the sink's thread -------------------------------------------------------------------------------------

    @property
    def is_asked(self) -> bool:
        """Whether there is something to do other than to go on."""
        with self._changed:
            return self._is_asked()

    @property
    def is_stopping(self) -> bool:
        with self._changed:
            return self._stop

    @property
    def must_hand_over(self) -> bool:
        with self._changed:
            return self._move_asked > self._move_released

    def release(self) -> None:
        """Nothing is read any more: answer :meth:`hand_over`."""
        with self._changed:
            self._move_released = self._move_asked
            self._changed.notify_all()

    def settings(self) -> Mapping[str, str]:
        """The settings to build the sink with now."""
        with self._changed:
            self._update = False
            return MappingProxyType(dict(self._settings))

    def end(self) -> None:
        """The sink reads no more: nobody need wait for it."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _is_asked(self) -> bool:
        return self._stop or self._update or self._move_asked > self._move_released
