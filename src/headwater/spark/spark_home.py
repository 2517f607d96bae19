"""A SPARK_HOME without ``python/``: Spark's Python workers then import pyspark as it is installed.

A Spark from a wheel brings pyspark twice: as a package, and as ``python/lib/pyspark.zip``, which it puts first on the
path of every worker. Nothing in the archive is compiled, so each one compiles what it imports: 0.6 s instead of 0.1 s
per process. In a directory with links to everything else of the wheel, the archive is not found, and the package is.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from headwater.spark.directories import cache_directory
from headwater.system.files import UnsafeDirectory, make_root

_LINKED: Final = ("bin", "data", "jars", "licenses", "sbin")
_TRIED: Final = ((3, 5), (4, 0), (4, 1), (4, 2), (4, 3))
"""Versions of pyspark with which this was tried."""


def linked_home() -> Path | None:
    """The directory for the pyspark that is installed, made when it is not there; ``None`` where it would not work."""
    import pyspark

    package = Path(pyspark.__file__).resolve().parent
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2] if part.isdigit())
    if version not in _TRIED or not (package / "jars").is_dir() or not (package / "bin" / "spark-submit").is_file():
        return None
    name = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    home = cache_directory() / f"spark-{pyspark.__version__}-{name}"
    try:
        make_root(home)  # Spark runs what is in it
        for part in _LINKED:
            if (package / part).is_dir():
                _link(home / part, package / part)
    except (OSError, UnsafeDirectory):
        return None
    return home


def _link(link: Path, target: Path) -> None:
    """Make it, also when others do the same right now."""
    if link.is_symlink() and link.readlink() == target:
        return
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(target)
    made.replace(link)
