"""A state store on a disk that is really full: nothing that is only read ends a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.small_disk import small_disk

_READ = """
import sys
from headwater.state import open_reader, open_writer
with open_writer(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.readline()
    snapshots = [open_reader(sys.argv[1]).snapshot() for _ in range(500)]
    print(len(snapshots), flush=True)
    for snapshot in snapshots:
        snapshot.close()
"""


def test_many_readers_can_begin_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        command = disk.command(sys.executable, "-c", _READ, str(disk.path / "store"))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            disk.fill()
            process.stdin.write("\n")
            process.stdin.close()
            assert process.stdout.read() == "500\n"
            assert process.wait(60) == 0
