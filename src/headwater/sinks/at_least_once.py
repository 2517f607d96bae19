"""AtLeastOnceSink: a base for sinks that cannot keep a token themselves: a terminal, somebody's web server.

What they have is kept in a file beside the staged rows, written after the rows were sent: a crash in between sends that
batch of that table again, with the same :func:`batch_key`. Nothing is ever lost, and no batch is sent twice without a
crash or an error.

The file is ``<staging>/_headwater_tokens/<table>/<query>.json`` with a :mod:`~headwater.sinks.token_record`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote

from headwater import failpoints
from headwater.sinks.row_batch import RowBatch
from headwater.sinks.row_sink import RowSink
from headwater.sinks.sink import Committed, Token
from headwater.sinks.storage import Storage
from headwater.sinks.token_record import TokenRecord
from headwater.sources.table import SourceTable
from headwater.sources.target_names import directory_name
from headwater.system.files import make_private, replace_file

DIRECTORY: Final = "_headwater_tokens"

BEFORE_SEND = failpoints.register("sink.at_least_once.before_send")
AFTER_SEND = failpoints.register("sink.at_least_once.after_send")
AFTER_TOKEN = failpoints.register("sink.at_least_once.after_token")


@dataclass(frozen=True, kw_only=True)
class AtLeastOnceSink(RowSink):
    """A sink that only sends. Its token is in the directory *staging*, which must stay where it is."""

    is_exactly_once: ClassVar[bool] = False

    @abstractmethod
    def send(self, table: SourceTable, key: str, batch: RowBatch) -> None:
        """Send the rows of *batch*, which is called *key* for good."""

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What was sent of *table*."""
        return self._read(table, query).committed(backfill)

    def write(self, table: SourceTable, token: Token, batch: RowBatch) -> None:
        failpoints.hit(BEFORE_SEND)
        self.send(table, batch_key(table, token), batch)
        failpoints.hit(AFTER_SEND)
        self._keep(table, token.query, self._read(table, token.query).following(token, batch.after))
        failpoints.hit(AFTER_TOKEN)

    def _read(self, table: SourceTable, query: str) -> TokenRecord:
        try:
            return TokenRecord.of_text(self._file(table, query).read_bytes())
        except FileNotFoundError:
            return TokenRecord()

    def _keep(self, table: SourceTable, query: str, record: TokenRecord) -> None:
        """Durably, and as a whole: a torn file would send everything again."""
        path = self._file(table, query)
        make_private(path.parent)
        replace_file(path, record.text, durable=True)

    def _file(self, table: SourceTable, query: str) -> Path:
        return Path(Storage(self.staging).within(DIRECTORY).of_table(table).address, f"{quote(query, safe='')}.json")


def batch_key(table: SourceTable, token: Token) -> str:
    """What a batch of a table is called, each time that it is sent: ``query/table/epoch/plan``.

    The plan is 0 before the first, then named with the state that it is of: ``backfill.plan``. History that was read
    anew has other rows, and another name: the attempt comes after it.
    """
    plan = f"{token.backfill}.{token.plan}" if token.plan else "0"
    key = f"{token.query}/{directory_name(table.namespace, table.name)}/{token.epoch}/{plan}"
    return f"{key}/attempt-{token.attempt}" if token.attempt else key
