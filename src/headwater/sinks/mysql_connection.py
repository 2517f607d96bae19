"""MySqlConnection: a connection that sends the rows of a ``LOAD DATA LOCAL`` from memory and never opens a file.

A server can answer any query with a request for any file of the client's machine. This connection serves one request
only: for the stream of the statement that it has just sent.
"""

from __future__ import annotations

from typing import Any, Final

import pymysql
from pymysql.constants import CLIENT, COMMAND

STREAM: Final = "headwater"
"""How statements name the rows that they load."""
_CHUNK: Final = 1 << 18


class FileRequested(pymysql.err.OperationalError):  # type: ignore[misc]
    """The server asked for a file of this machine that nothing here offered. The connection is closed."""


class MySqlConnection(pymysql.Connection):  # type: ignore[misc]
    """A connection. :param client_flag: capabilities besides ``LOCAL_FILES``; the others are those of the library."""

    def __init__(self, *, client_flag: int = 0, **options: Any) -> None:
        # the library itself must not serve requests: it would open whatever file the server names
        super().__init__(client_flag=client_flag | CLIENT.LOCAL_FILES, local_infile=False, **options)

    def load(self, statement: str, data: bytes) -> None:
        """Run a ``LOAD DATA LOCAL INFILE`` of :data:`STREAM`, whose content is *data*.

        :raises FileRequested: the server asked for something else. :raises pymysql.err.MySQLError: it refused.
        """
        self._execute_command(COMMAND.COM_QUERY, statement)
        if self._read_packet().get_all_data() != b"\xfb" + STREAM.encode():
            raise self._refused()
        for start in range(0, len(data), _CHUNK):
            self.write_packet(data[start : start + _CHUNK])
        self.write_packet(b"")
        if not self._read_packet().is_ok_packet():
            raise self._refused()

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        try:
            return super()._read_query_result(unbuffered=unbuffered)
        except RuntimeError as error:
            if "LOAD_LOCAL" not in str(error):
                raise
            raise self._refused() from None

    def _refused(self) -> FileRequested:
        self._force_close()
        return FileRequested("the server asked for a file of this machine")
