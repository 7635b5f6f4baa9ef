"""Files of weights that are the same bytes whenever they hold the same weights."""

import json
from pathlib import Path

_SIZE_BYTES = 8


def sort_metadata(path: Path) -> None:
    """Sorts the metadata in the header of a safetensors file, in place: safetensors writes them in random order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(_SIZE_BYTES), "little")
        header = json.loads(file.read(size))
        if "__metadata__" not in header:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        assert len(ordered) == size, f"{path} has a header that JSON does not write so"
        file.seek(_SIZE_BYTES)
        file.write(ordered)
