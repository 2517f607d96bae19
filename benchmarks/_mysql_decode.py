"""The binlog: how fast its events become Arrow columns, and a durable log, against mysql-replication.

Ours decodes the event packets of the server's files from memory, with checksums, into columns of the types that a
capture asks for. mysql-replication can only read from a server: its time has what the server takes to send, which is
little (a server sends hundreds of MB/s), and so has the capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _harness import Figure, interleaved, progress
from _mysql_capture import begin, capture
from _servers import MariaDbServer, packets_of, plan_of, start_server
from _timed_capture import Begun
from headwater.sources.mysql.binlog._row_decoder import Decoder
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import RowsEvent
from headwater.sources.mysql.binlog.python_rows import PythonRows
from headwater.sources.mysql.binlog.rows import RowsDecoder, is_compiled

BATCH = 10_000
STEP = 100
_NUMBERS = " UNION ALL ".join(f"SELECT {number} AS n" for number in range(STEP))
_TABLE = """
    CREATE TABLE orders (
        id bigint PRIMARY KEY, quantity int, price decimal(18,4), customer varchar(100), note text, created datetime(6),
        changed timestamp(6) NULL, details json, open tinyint, token char(36)
    ) CHARACTER SET utf8mb4
"""


@contextmanager
def written(family: str, rows: int) -> Iterator[tuple[MariaDbServer, list[str], Begun, int]]:
    """A server whose newest files hold *rows* inserts, half as many updates and a tenth of deletes.

    Its files, the position before the changes, and their number.
    """
    with start_server(family) as server:
        server.execute("CREATE DATABASE bench", "USE bench", _TABLE, "FLUSH BINARY LOGS")
        first = server.execute("SHOW BINARY LOGS")[-1][0]
        begun = begin(server)
        with server.connect(database="bench") as session, session.cursor() as cursor:
            for start in range(0, rows, STEP):
                cursor.execute(
                    f"""INSERT INTO orders SELECT {start} + n, n % 1000, n * 1.2345, concat('customer ', n % 977),
                        concat('a note of usual length for row ', {start} + n), '2026-01-01 00:00:00.123456',
                        '2026-02-03 04:05:06.789012', json_object('kind', n % 7, 'tags', 'a b', 'text', 'hello'), n % 3,
                        uuid() FROM ({_NUMBERS}) numbers"""
                )
            for start in range(0, rows // 2, STEP):
                cursor.execute(f"UPDATE orders SET quantity = quantity + 1 WHERE id >= {start} AND id < {start + STEP}")
            for start in range(0, rows // 10, STEP):
                cursor.execute(f"DELETE FROM orders WHERE id >= {start} AND id < {start + STEP}")
        names = [row[0] for row in server.execute("SHOW BINARY LOGS")]
        server.execute("FLUSH BINARY LOGS")
        yield server, names[names.index(first) :], begun, rows + rows // 2 + rows // 10


def to_columns(packets: list[bytes], make: type[Decoder | PythonRows]) -> int:
    """Decode everything, in batches; how many rows it gave (an update gives two)."""
    events, decoders, rows = EventDecoder(), dict[int, RowsDecoder](), 0
    for packet in packets:
        event = events.feed(packet)
        if not isinstance(event, RowsEvent):
            continue
        decoder = decoders.get(event.table.table_id)
        if decoder is None:
            decoder = decoders[event.table.table_id] = RowsDecoder(plan_of(event.table), make)
        decoder.add(event, 1, 0)
        if decoder.held_rows >= BATCH:
            rows += len(decoder.take())
    return rows + sum(len(decoder.take()) for decoder in decoders.values())


def replicate(server: MariaDbServer, name: str, changes: int) -> float:
    """Seconds that mysql-replication takes for all changes."""
    from pymysqlreplication import BinLogStreamReader
    from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": server.port,
        "user": "headwater",
        "passwd": server.password,
    }
    seen, start = 0, time.perf_counter()
    stream = BinLogStreamReader(
        connection_settings=settings,
        server_id=4712,
        only_events=[DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent],
        log_file=name,
        log_pos=4,
        resume_stream=True,
        blocking=False,
        is_mariadb=server.kind == "MariaDB",
    )
    try:
        for event in stream:
            seen += len(event.rows)
            if seen >= changes:
                break
    finally:
        stream.close()
    assert seen >= changes, f"mysql-replication gave {seen} of {changes} changes"
    return time.perf_counter() - start


def measure_decode(quick: bool) -> list[Figure]:
    return [figure for family in ("mariadb", "mysql") for figure in _measure(family, quick)]


def _measure(family: str, quick: bool) -> list[Figure]:
    rows, times = (20_000, 2) if quick else (200_000, 3)
    best = Decoder if is_compiled() else PythonRows
    with progress(f"{family}: the binlog to columns"), written(family, rows) as work:
        server, names, begun, changes = work
        packets = [packet for name in names for packet in packets_of(server.data / name)]
        assert to_columns(packets, best) == changes + rows // 2
        library = min(replicate(server, names[0], changes) for _ in range(1 if quick else 2))
        end, _ = begin(server)
        captured = changes / min(capture(server, begun, end) for _ in range(times))
        jobs: list[Callable[[], object]] = [
            lambda: to_columns(packets, best),
            lambda: to_columns(packets, PythonRows),
            lambda: b"".join(packets),
        ]
        seconds = [*interleaved(times, *jobs), library]
    ours, python, copied, library = (changes / taken for taken in seconds)
    kind = "compiled" if is_compiled() else "Python"
    return [
        Figure(f"{family}: wire to durable log vs mysql-replication", captured, library, 5.0, "higher", "changes/s"),
        Figure(f"{family}: {kind} decoder vs mysql-replication", ours, library, 5.0, "higher", "changes/s"),
        Figure(f"{family}: Python decoder vs mysql-replication", python, library, None, "higher", "changes/s"),
        Figure(f"{family}: {kind} decoder vs Python decoder", ours, python, None, "higher", "changes/s"),
        Figure(f"{family}: {kind} decoder vs copy of the packets", ours, copied, None, "higher", "changes/s"),
    ]
