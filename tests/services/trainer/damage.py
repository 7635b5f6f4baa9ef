"""Damages files of checkpoints."""

import json
import struct
from pathlib import Path

from services.trainer.checkpoints.state import read_state


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flips bits of one byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def shard(checkpoint: Path, rank: int = 0) -> Path:
    return sorted(checkpoint.glob("*.safetensors"))[rank]


def offset_of(file: Path, prefix: str) -> int:
    """Where the middle of the first tensor whose name begins so is in a safetensors file."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    begin, end = next(part["data_offsets"] for name, part in sorted(header.items()) if name.startswith(prefix))
    return int(8 + size + (begin + end) // 2)


def flip_tensor(checkpoint: Path, prefix: str, rank: int = 0) -> None:
    file = shard(checkpoint, rank)
    flip(file, offset_of(file, prefix), 0x40)


def flip_state(checkpoint: Path) -> None:
    """In the number of applied steps, so that the JSON stays well formed."""
    file = checkpoint / "state.json"
    flip(file, file.read_bytes().index(b'"applied": ') + len(b'"applied": '))


def zero_header(checkpoint: Path) -> None:
    with shard(checkpoint).open("r+b") as file:
        file.write(bytes(4096))


def truncate(checkpoint: Path) -> None:
    file = shard(checkpoint)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def lose_file(checkpoint: Path) -> None:
    shard(checkpoint).unlink()


def lose_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def without_digests(checkpoint: Path) -> None:
    """Rewrites a checkpoint in the format without digests."""
    state = read_state(checkpoint)
    del state["digests"]
    (checkpoint / "state.json").write_text(json.dumps(state))
