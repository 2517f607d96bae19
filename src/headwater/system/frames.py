"""The traceback of an error without what it could leak: frames, class names, and the messages of our own errors."""

from __future__ import annotations

import itertools
import re
import traceback
from typing import Final

from headwater.errors import HeadwaterError

_MOST_FRAMES: Final = 64
_FRAME: Final = re.compile(r'\s+File "[^"]+", line \d+, in \S+')


def traceback_of(error: BaseException) -> str:
    """The frames of *error* and its causes, the first cause first, as Python prints them.

    What an error of another library says is left out: it could hold row values. Ours never does.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n\n".join(map(_one, reversed(chain)))


def _one(error: BaseException) -> str:
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__, limit=-_MOST_FRAMES))
    message = f": {error}" if isinstance(error, HeadwaterError) else ""
    return "".join(frames) + type(error).__name__ + message


def frames_in(text: str) -> str:
    """The frames of the tracebacks in *text*, each once: what Spark says of an error of another process."""
    frames: dict[str, None] = {}
    for line, code in itertools.pairwise([*text.splitlines(), ""]):
        if _FRAME.fullmatch(line):
            frames[f"{line}\n{code}" if code.startswith("    ") else line] = None
    return "\n".join(list(frames)[-_MOST_FRAMES:])
