"""Data sets of the Hugging Face Hub: hf://datasets/ORG/NAME[@REVISION][/SPLIT or /FILE]. Needs huggingface_hub.

Files are streamed and nothing is written, because who reads for jobs may open no file. `HF_ENDPOINT` names another Hub
and `HF_TOKEN` opens gated data sets.
"""

import os
import re
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from flowfleet.extras import pip_install
from flowfleet.prompts.formats import SUFFIXES

SCHEME = "hf://"
_ROOT = "hf://datasets/"
_SHAPE = "write hf://datasets/ORG/NAME, then maybe @REVISION and /SPLIT or /FILE"
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_SHOWN = 5


def is_dataset(url: str) -> bool:
    """Returns True if a place names a data set or a split. The Hub has to list its files."""
    return url.startswith(SCHEME) and (len(_parts(url)) < 3 or not _is_file(url))


def check_place(url: str) -> None:
    """Raises ValueError for names that cannot be a data set of the Hub. Makes no request."""
    organization, name, *rest = [*_parts(url), "", ""]
    revision = name.partition("@")[2]
    if not url.startswith(_ROOT) or not (_PLAIN.fullmatch(organization) and _PLAIN.fullmatch(name.partition("@")[0])):
        raise ValueError(f"{url}: it names no data set of the Hub: {_SHAPE}")
    if ".." in (organization, name, *rest) or ("@" in name and not _PLAIN.fullmatch(revision)):
        raise ValueError(f"{url}: a plain revision and a path without .. are read: {_SHAPE}")


def files_of(url: str) -> list[str]:
    """URLs of the files of a data set's split, in order; of the split `train` where none is named.

    Raises ValueError where there is no such split or more than one, and OSError as the Hub does."""
    check_place(url)
    organization, name, *rest = _parts(url)
    repo, split = f"datasets/{organization}/{name}", "/".join(rest) or "train"
    inside = {path: path.removeprefix(f"{repo}/") for path in sorted(_files().find(repo)) if _is_file(path)}
    files = [path for path, short in inside.items() if _is_of(short, split)]
    if not files and not rest and len(inside) == 1:
        files = list(inside)
    shown = ", ".join(list(inside.values())[:_SHOWN]) or "none that can be read"
    if not files:
        raise ValueError(f"{url}: no file of the split {split!r}; its files are {shown}: name a split or a file")
    if len({(str(PurePosixPath(path).parent), PurePosixPath(path).suffix.lower()) for path in files}) > 1:
        raise ValueError(f"{url}: {split!r} is in several folders or formats ({shown}): name one file")
    return [f"{SCHEME}{path}" for path in files]


def open_file(url: str) -> BinaryIO:
    """A file of a data set, to be closed. Raises OSError, FileNotFoundError where it is not there."""
    check_place(url)
    file: BinaryIO = _files().open(url.removeprefix(SCHEME), "rb")
    return file


def load() -> None:
    """Imports what talks to the Hub. Raises ImportError."""
    import huggingface_hub.hf_file_system  # noqa: F401


def _files() -> Any:
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise ValueError(f"reading hf:// needs huggingface_hub: {pip_install('data')} where data are read") from None
    return HfFileSystem(
        endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN") or False, skip_instance_cache=True
    )


def _parts(url: str) -> list[str]:
    return [part for part in url.removeprefix(_ROOT).split("/") if part]


def _is_file(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in SUFFIXES


def _is_of(path: str, split: str) -> bool:
    """Returns True if a file lies in a folder of the split's name, or has that name as a word in its own."""
    stem = PurePosixPath(path).with_suffix("").name
    return path.startswith(f"{split}/") or split in re.split(r"[._-]", stem) or f"/{split}/" in path
