"""Records the binlogs in ``tests/fixtures/binlog`` from real servers: ``python -m tests.db.mysql.record_binlogs``.

Beside each file lies what the server's SELECT showed of the rows that it inserted, column by column.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.db.mysql.binlog_reading import closed_file
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import start_server

PLACE = Path(__file__).parents[2] / "fixtures" / "binlog"

COLUMNS = {
    "id": "int primary key",
    "i": "mediumint",
    "u": "bigint unsigned",
    "d": "decimal(30,10)",
    "n": "decimal(65,30)",
    "y": "year",
    "da": "date",
    "ti": "time(3)",
    "dt": "datetime(6)",
    "ts": "timestamp(2) null",
    "c": "char(10) character set latin1",
    "v": "varchar(300) character set utf8mb4",
    "g": "varchar(20) character set gbk",
    "t": "text character set utf8mb4",
    "b": "binary(4)",
    "bl": "blob",
    "bt": "bit(12)",
    "e": "enum('x','ä') character set utf8mb4",
    "s": "set('p','q') character set utf8mb4",
    "j": "json",
    "ge": "geometry",
}
SHOWN = {
    "b": "lower(hex(b))",
    "bl": "lower(hex(bl))",
    "bt": "lower(lpad(hex(bt), 4, '0'))",
    "ge": "lower(substr(hex(ge), 9))",
}
ROWS = (
    """(1, -8388608, 18446744073709551615, -1.5,
       99999999999999999999999999999999999.999999999999999999999999999999, 2155,
       '0000-00-00', '-838:59:59.000', '2020-01-02 03:04:05.678901', '2038-01-19 03:14:07.99', 'ÿ€', 'grüße 🎉', '中文',
       'text', x'0102', x'00ff', b'101010101010', 'ä', 'p,q', '{"a": [1, 2.5, null, true], "b": {"c": "ü\\\\n"}}',
       POINT(1, 2))""",
    "(2" + ", NULL" * 20 + ")",
    """(3, 1, 0, 0, -0.000000000000000000000000000001, 0, '9999-12-31', '00:00:00.001', '0000-00-00 00:00:00', 0,
       '', '', '', '', '', '', 0, '', '', '[]', LINESTRING(POINT(0, 0), POINT(1, 1)))""",
)


def record(server: MariaDbServer, name: str, before: list[str]) -> None:
    body = ", ".join(f"{column} {kind}" for column, kind in COLUMNS.items())
    server.execute("DROP DATABASE IF EXISTS shop", "CREATE DATABASE shop", "FLUSH BINARY LOGS")
    shown = ", ".join(SHOWN.get(column, f"concat({column}, '')") for column in COLUMNS)
    with server.connect(database="shop", sql_mode="") as session, session.cursor() as cursor:
        for statement in ["SET time_zone = '+00:00'", *before, f"CREATE TABLE t ({body})"]:
            cursor.execute(statement)
        for row in ROWS:
            cursor.execute(f"INSERT INTO t VALUES {row}")
        cursor.execute(f"SELECT {shown} FROM t ORDER BY id")
        rows = [[None if value is None else str(value) for value in row] for row in cursor.fetchall()]
        if server.kind == "MySQL":
            cursor.execute("SET SESSION binlog_row_value_options = 'PARTIAL_JSON'")
            cursor.execute("UPDATE t SET j = JSON_SET(j, '$.a[0]', 7) WHERE id = 1")
        cursor.execute("UPDATE t SET v = repeat('x', 280), i = 5")
        cursor.execute("SET SESSION binlog_row_image = 'MINIMAL'")
        cursor.execute("UPDATE t SET y = 2001 WHERE id < 3")
        cursor.execute("DELETE FROM t")
    shutil.copyfile(closed_file(server), PLACE / f"{name}.bin")
    columns = {column: [row[place] for row in rows] for place, column in enumerate(COLUMNS)}
    (PLACE / f"{name}.json").write_text(json.dumps(columns, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    with start_server("mariadb") as mariadb:
        record(mariadb, "mariadb-10.11", [])
        mariadb.execute("SET GLOBAL log_bin_compress = ON", "SET GLOBAL log_bin_compress_min_len = 10")
        record(mariadb, "mariadb-10.11-compressed", [])
    with start_server("mysql") as mysql:
        record(mysql, "mysql-9.7", ["SET gtid_next = 'AUTOMATIC:tag'"])
        record(mysql, "mysql-9.7-compressed", ["SET SESSION binlog_transaction_compression = ON"])


if __name__ == "__main__":
    main()
