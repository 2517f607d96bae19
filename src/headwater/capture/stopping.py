"""Stop a capture on a signal, in bounded time, also while its store or its source does not answer.

A last seal that gets no answer is not waited for: the process ends as ``kill -9`` would end it, and the next start
resumes from the last sealed epoch.
"""

from __future__ import annotations

import os
import signal
import socket
import threading

from headwater.capture.capture import Capture

END_SECONDS = 8.0
"""How long after the signal the process ends at the latest."""

_LATE = (
    f"The capture did not end within {END_SECONDS:g} s of the signal: its store or its source does not answer. "
    "The process ends without a last seal. No action needed: the next start resumes from the last sealed epoch.\n"
)


def stop_on_signals(running: Capture, *numbers: int) -> None:
    """Stop *running* on the signals *numbers*; call it in the main thread, before ``running.run()``."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for number in numbers:
        signal.signal(number, lambda *_: running.stop())
    # a handler waits for the main thread to return to Python; this is written at once
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_end_late, args=(running, receiver, numbers), name="headwater-stop", daemon=True).start()


def _end_late(running: Capture, receiver: socket.socket, numbers: tuple[int, ...]) -> None:
    while receiver.recv(1)[0] not in numbers:
        pass
    running.stop()
    if not running.wait_for_end(END_SECONDS):
        os.write(2, _LATE.encode())
        os._exit(1)
