"""`state.json` of a checkpoint: all state except tensors; sizes and digests of the files, its own included."""

import hashlib
import json
from pathlib import Path
from typing import Any

from flowfleet.errors import DataLoss, OtherFormat
from services.trainer.checkpoints.files import DAMAGED

FORMAT = "flowfleet.trainer.v2"


def complete_state(path: Path) -> dict[str, Any] | None:
    """`state.json` of a complete checkpoint, else None."""
    try:
        return read_state(path)
    except (DataLoss, OtherFormat):
        return None


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint whose files are there. Raises DataLoss for one that is damaged, OtherFormat for one
    of another version, OSError for unreachable storage."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        digest = state.pop("digest", None)
        if digest is None and "digests" not in state:
            state["digests"] = {}  # written before there were digests: its sizes alone tell
        elif digest != _digest(state):
            raise DataLoss(f"{path.name} is damaged: state.json does not have the digest {digest}")
        if state["format"] != FORMAT:
            raise OtherFormat(
                f"{path} has the format {state['format']}, but this trainer reads {FORMAT}: run the version of "
                "Flowfleet that wrote it, or move the folder away to begin again without it"
            )
        for name, size in state["files"].items():
            if (size_now := (path / name).stat().st_size) != size:
                raise DataLoss(f"{path.name} is damaged: {name} has {size_now} bytes, written were {size}")
    except OSError as error:
        if error.errno not in DAMAGED:
            raise
        raise DataLoss(f"{path.name} is damaged: {Path(error.filename or path).name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLoss(f"{path.name} is damaged: state.json: {type(error).__name__}: {error}") from None
    return state


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes `state.json` with its digest."""
    plain = json.loads(json.dumps(state))
    text = json.dumps({**plain, "digest": _digest(plain)})
    (path / "state.json").write_text(text, encoding="utf-8")


def _digest(state: dict[str, Any]) -> str:
    """sha256 of the contents of `state.json`, whatever its formatting."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
