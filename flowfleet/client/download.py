"""Brings a model to a folder of this machine: file by file, each under another name until its CRC-32 is right.

`.flowfleet-download` marks a folder whose download has not ended, so that the same command resumes it. The
manifest is written last. A folder that holds anything else is left alone.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from flowfleet.api.problems import ApiError
from flowfleet.filesystem import writing
from flowfleet.job.model_files import MANIFEST, ModelFile, ModelManifest, check_name, read_manifest

MARK: Final = ".flowfleet-download"
TRIES: Final = 4
DELAY_S: Final = 1.0
AGAIN: Final = (0, 404, 409, 502, 503, 504)
"""Statuses of an unreachable controller, or of a model that was replaced by a newer one."""
_PIECE: Final = 2**20

Fetch = Callable[[str, str], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""(name, CRC-32) → the file's bytes."""


async def download(ask: Callable[[], Awaitable[ModelManifest]], fetch: Fetch, folder: Path) -> ModelManifest:
    """`ask` gives the manifest. A model that is replaced meanwhile starts again, as does a file whose transfer
    broke."""
    for number in range(TRIES):
        manifest = await ask()
        try:
            await _fill(folder, manifest, fetch)
        except ApiError as error:
            if error.status not in AGAIN or number == TRIES - 1:
                raise
            await asyncio.sleep(DELAY_S)
        else:
            return manifest
    raise AssertionError("the last try returns or raises")


async def _fill(folder: Path, manifest: ModelManifest, fetch: Fetch) -> None:
    names = {name: check_name(name) for name in manifest.files}
    if await asyncio.to_thread(_is_whole, folder, manifest):
        return
    _take(folder, manifest)
    for name, file in manifest.files.items():
        path = folder / names[name]
        if not await asyncio.to_thread(_is_file, path, file):
            await _write(path, name, file, fetch)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    (folder / MARK).unlink(missing_ok=True)


def _is_whole(folder: Path, manifest: ModelManifest) -> bool:
    """True if the folder already holds every file of this very model."""
    if not (folder / MANIFEST).is_file() or (folder / MARK).exists() or read_manifest(folder) != manifest:
        return False
    return all(_is_file(folder / name, file) for name, file in manifest.files.items())


def _take(folder: Path, manifest: ModelManifest) -> None:
    """Marks a folder as that of this download. Raises ValueError for one that holds something else."""
    folder.mkdir(parents=True, exist_ok=True)
    here = [path.name for path in folder.iterdir()]
    is_ours = MARK in here or (MANIFEST in here and read_manifest(folder) == manifest)
    if here and not is_ours:
        raise ValueError(f"{folder} is not empty and holds another model or something else: give a new folder")
    (folder / MARK).write_text(manifest.model_dump_json(), encoding="utf-8")


def _is_file(path: Path, file: ModelFile) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    digest = 0
    with path.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest = zlib.crc32(piece, digest)
    return f"{digest:08x}" == file.crc32


async def _write(path: Path, name: str, file: ModelFile, fetch: Fetch) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    digest = size = 0
    async with fetch(name, file.crc32) as pieces:
        with writing(aside), aside.open("wb") as opened:
            async for piece in pieces:
                size += len(piece)
                if size > file.size_bytes:
                    break
                digest = zlib.crc32(piece, digest)
                opened.write(piece)
    if (size, f"{digest:08x}") != (file.size_bytes, file.crc32):
        aside.unlink()
        raise ApiError(502, f"{name} arrived damaged: {size} bytes with the CRC-32 {digest:08x}, not {file.crc32}")
    aside.replace(path)
