"""Touch every page that an embedded store refers to; run as a process of its own.

Reading a page beyond the end of a mapped file ends the process by SIGBUS. When a store's file is shorter than its last
page number says, either the missing pages are free ones (LMDB does not write those) or the file was cut. The
parent lets this child find out: it ends well, or it does not.
"""

from __future__ import annotations

import sys
from typing import Any

import lmdb


def walk(path: str) -> None:
    """:raises lmdb.Error: LMDB found damage."""
    environment: Any = lmdb.open(path, readonly=True, create=False, max_dbs=3, map_size=1 << 40)
    with environment.begin(buffers=True) as txn:
        for table in (None, b"meta", b"main", b"undo"):
            db = environment.open_db(table, txn=txn, create=False) if table else environment.open_db(None, txn=txn)
            with txn.cursor(db=db) as cursor:
                for _, value in cursor:
                    bytes(value[-1:])  # the pages of a value are neighbours: the last one there, all there


if __name__ == "__main__":
    walk(sys.argv[1])
