"""Freed memory is used again."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
from headwater.system.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [bytearray(4 << 20)]
del blocks
before = faults()
for _ in range(20):
    a, b = bytearray(4 << 20), bytearray(40 << 20)
    del a, b
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_large_blocks_are_not_taken_from_the_kernel_again_and_again() -> None:
    assert faults("keep") < faults("leave") / 4
