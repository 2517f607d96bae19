"""Which PySpark an import would load, and whether Headwater supports it. Never imports PySpark, never starts Java."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from headwater.spark.errors import SparkMissing, UnsupportedSpark

OLDEST: Final = (3, 5)
"""The oldest PySpark that pipelines run on."""
MAJOR: Final = 4
"""The newest major version that we know."""

_STEP: Final = "Run: pip install 'pyspark>=3.5,<5'"


def installed_spark() -> str:
    """The version that ``import pyspark`` would load, as PySpark spells it.

    It is read from the package itself, not from installer metadata: a Spark distribution on ``PYTHONPATH`` has none.

    :raises SparkMissing: PySpark is not installed.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SparkMissing("PySpark is not installed.", next_step="Run: pip install 'headwater[spark]'")
    path = Path(spec.origin).with_name("version.py")
    try:
        source = spec.loader.get_data(str(path)).decode()  # type: ignore[union-attr] # also inside a zip file
    except OSError:
        source = ""
    match = re.search(r"""^__version__[^=\n]*=\s*["']([^"']+)""", source, re.MULTILINE)
    return match[1] if match else "unknown"


def minor_version(text: str) -> tuple[int, int] | None:
    """Major and minor version of ``3.5.9`` or ``4.1.0.dev1``; ``None`` for any other text."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def check_spark() -> str:
    """The installed version, if Headwater supports it.

    :raises SparkMissing: PySpark is not installed. :raises UnsupportedSpark: it is too old, too new, or unknown.
    """
    text = installed_spark()
    version = minor_version(text)
    if version is None:
        raise UnsupportedSpark("The version of the installed PySpark is unknown.", next_step=_STEP)
    if version < OLDEST:
        raise UnsupportedSpark(f"PySpark {text} is too old: Headwater needs 3.5 or later.", next_step=_STEP)
    if version[0] > MAJOR:
        raise UnsupportedSpark(
            f"PySpark {text} is not supported: this version of Headwater knows Spark 3.5 and 4.",
            next_step=f"Upgrade Headwater. Or: {_STEP.removeprefix('Run: ')}",
        )
    return text
