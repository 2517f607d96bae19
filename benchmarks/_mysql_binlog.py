"""The binlog: how fast a capture makes it durable, and how fast its events become Arrow columns.

The bounds are the program ``mysqlbinlog`` of the server's own family: for the capture, the same files received from the
server and written as they are (``--raw``); for the decoder, the rows of the same files decoded to text (``--verbose``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from _harness import Figure, Speed, interleaved, progress, scratch, seconds_of
from _servers import MariaDbServer, packets_of, plan_of, start_server
from _timed_capture import Begun, timed_capture
from _tools import decode_binlog, receive_binlog
from headwater.sources.mysql.binlog._row_decoder import Decoder
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import RowsEvent
from headwater.sources.mysql.binlog.python_rows import PythonRows
from headwater.sources.mysql.binlog.rows import RowsDecoder, is_compiled
from headwater.sources.open import open_source

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

    :returns: the server, its files, the position before the changes, and the number of changes.
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
    """Decode everything, in batches. :returns: the number of rows; an update has two."""
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


def begin(server: MariaDbServer) -> Begun:
    """Where a capture of ``bench.orders`` would begin now."""
    with scratch() as folder:
        source = open_source(f"{server.dsn}bench", spill=folder)
        begun = source.begin(source.tables(["bench.orders"]), resumed=False)
        source.close()
    return begun


def receive(server: MariaDbServer, first: str) -> float:
    """Seconds that ``mysqlbinlog`` takes for the files from *first* on."""
    with scratch() as folder:
        return seconds_of(receive_binlog(server, first, folder).run)


def measure_binlog(quick: bool) -> list[Figure]:
    return [figure for family in ("mariadb", "mysql") for figure in _measure(family, quick)]


def _measure(family: str, quick: bool) -> list[Figure]:
    rows, turns = (100_000, 1) if quick else (200_000, 3)
    with progress(f"{family}: the binlog"), written(family, rows) as work:
        server, names, begun, changes = work
        end, _ = begin(server)
        last = server.execute("SHOW BINARY LOGS")[-1][0]  # without changes
        captured, received, started = [], [], []
        for _ in range(turns):
            run = timed_capture(f"{server.dsn}bench", "bench.orders", begun, end, changes + rows // 2)
            captured.append(run.speed(changes))
            received.append(receive(server, names[0]))
            started += [receive(server, last) for _ in range(3)]
        decoders = _decode(server, names, last, changes, rows, turns)
    ours, tool = Speed.best(captured), Speed.of_sizes((0, min(started)), (changes, min(received)))
    name, unit = f"{family}: wire to durable log", "changes/s"
    return [
        Figure(f"{name}, after the first seal / mysqlbinlog --raw", ours.rate, tool.rate, None, "higher", unit, turns),
        Figure(f"{name}: first seal / mysqlbinlog of no changes", ours.start, tool.start, None, "lower", "s", turns),
        *(
            Figure(f"{family}: {text}", value, bound, goal, "higher", unit, turns)
            for text, value, bound, goal in decoders
        ),
    ]


def _decode(
    server: MariaDbServer, names: list[str], last: str, changes: int, rows: int, turns: int
) -> list[tuple[str, float, float, float | None]]:
    """Name, value, bound and goal of the figures of the decoders."""
    compiled = Decoder if is_compiled() else PythonRows
    kind = "compiled" if is_compiled() else "Python"
    packets = [packet for name in names for packet in packets_of(server.data / name)]
    assert to_columns(packets, compiled) == changes + rows // 2
    few = packets[: max(1, len(packets) // 5)]  # the Python decoder is slow
    few_rows = to_columns(few, compiled)
    jobs: list[Callable[[], object]] = [
        lambda: to_columns(packets, compiled),
        lambda: to_columns(few, compiled),
        lambda: to_columns(few, PythonRows),
        lambda: b"".join(packets),
        decode_binlog(server, names).run,
        decode_binlog(server, [last]).run,
    ]
    ours, ours_few, python, copied, to_text, start = interleaved(turns, *jobs)
    text = Speed.of_sizes((0, start), (changes, to_text))
    return [
        (f"{kind} decoder / mysqlbinlog --verbose to text", changes / ours, text.rate, 1.0),
        (f"{kind} decoder / Python decoder, first fifth", few_rows / ours_few, few_rows / python, None),
        (f"{kind} decoder / copy of the packets", changes / ours, changes / copied, None),
    ]
