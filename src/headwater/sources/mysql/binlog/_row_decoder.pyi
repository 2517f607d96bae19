from headwater.sources.mysql.binlog.python_rows import Buffers
from headwater.sources.mysql.binlog.row_layout import RowLayout

class Decoder:
    def __init__(self, layouts: list[RowLayout], /) -> None: ...
    @property
    def held_rows(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    def add(
        self,
        data: bytes,
        start: int,
        end: int,
        kind: int,
        present: bytes,
        present_after: bytes,
        transaction: int,
        seq: int,
        /,
    ) -> int: ...
    def take_buffers(self) -> Buffers: ...
