"""Says how to install an extra where this Flowfleet came from."""

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHECKOUT = Path(__file__).parents[1]


def pip_install(extra: str) -> str:
    """The command that adds an extra: editable in a checkout, whose code a copy would hide; from the same folder where
    pip copied one; else by name."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '{'.' if Path.cwd() == CHECKOUT else CHECKOUT}[{extra}]'"
    return f"pip install '{_copied_from() or 'flowfleet'}[{extra}]'"


def _copied_from() -> str:
    """The folder that pip installed from; empty without one (PEP 610)."""
    try:
        origin = json.loads(importlib.metadata.distribution("flowfleet").read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        return ""
    folder = unquote(urlsplit(origin["url"]).path) if "dir_info" in origin else ""
    return folder if folder and Path(folder).is_dir() else ""
