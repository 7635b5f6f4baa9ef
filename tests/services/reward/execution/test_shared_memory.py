from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from services.reward.execution.shared_memory import KEPT_BYTES, SharedMemory


def echo(memory: SharedMemory, pipe: Connection[Any, Any]) -> None:
    """In another process: answers lengths and last bytes of what it reads."""
    while ends := pipe.recv():
        pipe.send([(len(part), part[-1:]) for part in memory.read(ends)])


def test_another_process_reads_what_was_written_whatever_its_size() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    memory = SharedMemory()
    process = context.Process(target=echo, args=(memory, theirs), daemon=True)
    process.start()
    theirs.close()
    for sizes in ([3], [0, 5, 0], [2**21, 1], [KEPT_BYTES + 1], [7], [2**20 + 1], []):
        parts = [bytes(size - 1) + bytes([size % 251]) if size else b"" for size in sizes]
        pipe.send(memory.write(parts))
        assert pipe.recv() == [(len(part), part[-1:]) for part in parts]
    pipe.send(None)
    process.join(10)
    assert process.exitcode == 0
    memory.close()


def test_what_a_large_content_took_is_given_back() -> None:
    memory = SharedMemory()
    memory.write([bytes(2 * KEPT_BYTES)])
    assert memory.num_bytes == 2 * KEPT_BYTES
    memory.write([b"x"])
    assert memory.num_bytes < KEPT_BYTES
    memory.write([bytes(KEPT_BYTES)])
    memory.write([b"x"])
    assert memory.num_bytes == KEPT_BYTES
    memory.close()
