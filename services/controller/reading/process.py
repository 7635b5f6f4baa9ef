"""`python -m services.controller.reading.process SOCKET`: reads what jobs name, with none of the controller's secrets.

The controller (reader.py) starts it with an environment of its own, asks by a socket, and hands over files of this
machine already opened; URLs are fetched here. Before the first question the process confines itself (confinement.py):
it can open no other file, start no program and connect to public or listed addresses alone. Stores find their
credentials in its environment, where the controller's are not.

A question is a JSON object behind its length, with descriptors of files; an answer is a JSON object and bytes, behind
their lengths. Prompts go into a file that the controller opened (packed.py). The process ends with the socket.

What is read may take far more memory than it has bytes, so the process has a limit, and is the first to be killed where
the machine has none left.
"""

import contextlib
import io
import ipaddress
import itertools
import json
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flowfleet.prompts import hub
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import parse_prompts
from services.controller.reading.confinement import Network, confine
from services.controller.reading.packed import Packer

QUESTION = struct.Struct("!I")
ANSWER = struct.Struct("!IQ")
MOST_DESCRIPTORS = 2
FIRST_KILLED = 1000
"""The largest oom_score_adj of Linux."""
_QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF's orientations that swap width and height."""


def main(arguments: list[str]) -> NoReturn:
    connection = prepare(arguments)
    while True:
        message, descriptors = _receive(connection)
        try:
            answer, body = _answer(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        head = json.dumps(answer).encode()
        connection.sendall(ANSWER.pack(len(head), len(body)) + head)
        connection.sendall(body)


def prepare(arguments: list[str]) -> socket.socket:
    """Loads all code that may be needed, then confines the process. Gives the controller's socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[0]))
    settings = json.loads(arguments[1])
    load(settings["schemes"])
    if settings["tables"]:
        load_tables()
    resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"], settings["memory"]))
    with contextlib.suppress(OSError):  # of another kernel
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_KILLED), encoding="ascii")
    networks: list[Network] = [ipaddress.ip_network(network) for network in settings["networks"]]
    confine(networks)
    return connection


def load(schemes: list[str]) -> None:
    """Imports early: as another user the interpreter's files may be out of reach later on."""
    import encodings.idna  # of host names
    import encodings.utf_8_sig  # noqa: F401

    from PIL import ExifTags, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401

    if {"http", "https"} & set(schemes):
        import services.controller.reading.stores  # noqa: F401
    if "hf" in schemes:
        with contextlib.suppress(ImportError):  # told when it is asked for
            hub.load()
    if stores := set(schemes) - {"http", "https", "hf"}:
        from services.controller.reading.stores import load_stores

        load_stores(stores)


def load_tables() -> None:
    """Imports what reads tables."""
    with contextlib.suppress(ImportError):  # told when a table is asked for
        import pyarrow.parquet  # noqa: F401


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Ends the process with the socket."""
    head, descriptors, _, _ = socket.recv_fds(connection, QUESTION.size, MOST_DESCRIPTORS)
    if len(head) < QUESTION.size:
        raise SystemExit(0)
    (size,) = QUESTION.unpack(head)
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise SystemExit(0)
        data += part
    message: dict[str, Any] = json.loads(data)
    return message, descriptors


def _answer(message: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], bytes]:
    try:
        if message["do"] == "size":
            return {"size": _picture_size(descriptors[0], message["format"])}, b""
        if message["do"] == "files":
            return {"files": hub.files_of(message["url"])}, b""
        if message["do"] == "prompts":
            return _prompts(message, *descriptors), b""
        limit = int(message["limit"])
        return {}, _read_file(descriptors[0], limit) if descriptors else _fetch(message["url"], limit)
    except FileNotFoundError as error:
        return {"missing": str(error)}, b""
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        place = message.get("place", "the file")
        return {
            "refused": f"{place}: reading it takes more than {limit} bytes of memory: split it, or give .jsonl"
        }, b""
    except ValueError as error:  # what is wrong would be so at the next try
        return {"refused": str(error)}, b""
    except Exception as error:  # of whatever a store's client raises
        return {"error": _reason(error)}, b""


def _reason(error: BaseException) -> str:
    """Returns what the confinement said (confinement.py), where a client says only that it could not connect."""
    seen, cause = [error], error.__cause__ or error.__context__
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    refused = next((one for one in seen if isinstance(one, PermissionError)), error)
    return f"{type(refused).__name__}: {refused}"


def _prompts(message: dict[str, Any], out: int, descriptor: int | None = None) -> dict[str, Any]:
    """Appends the prompts of a file to those of its data set. A file at a URL is fetched whole first."""
    place, limit, named = message["place"], message["limit"], message["columns"]
    columns = Columns(**{**named, "ignored": frozenset(named["ignored"])})
    source: BinaryIO
    if descriptor is not None:
        source = os.fdopen(os.dup(descriptor), "rb")
    else:
        source = io.BytesIO(_fetch(message["url"], limit + 1))
        if len(source.getbuffer()) > limit:
            raise ValueError(f"{place} is too large: a prompt file has at most {limit} bytes")
    packer = Packer(out, message["count"], message["size"], limit)
    with source:
        prompts = parse_prompts(source, place, columns, message["format"], message["first"])
        for prompt in itertools.islice(prompts, message["most"]):
            try:
                packer.add(prompt, message["file"], int(prompt.source.rpartition(":")[2]))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
    packer.flush()
    return {"count": packer.count, "size": packer.size_bytes}


def _read_file(descriptor: int, limit: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read(limit)


def _picture_size(descriptor: int, form: str) -> tuple[int, int]:
    """Width and height as they are shown, by the header alone."""
    from PIL import ExifTags, Image

    Image.MAX_IMAGE_PIXELS = None  # nothing is decoded here; whoever asks says what is too large
    with os.fdopen(os.dup(descriptor), "rb") as file, Image.open(file, formats=[form]) as picture:
        # of the base class: a PNG's own reads all pixels first, for data behind them
        orientation = Image.Image.getexif(picture).get(ExifTags.Base.Orientation)
        width, height = picture.size
    return (height, width) if orientation in _QUARTER_TURNS else (width, height)


def _fetch(url: str, limit: int) -> bytes:
    if url.startswith(hub.SCHEME):
        with hub.open_file(url) as file:
            return file.read(limit)
    if not url.lower().startswith(("http://", "https://")):
        from services.controller.reading.stores import read_object

        return read_object(url, limit)
    from services.controller.reading.stores import fetch

    return fetch(url, limit)


if __name__ == "__main__":
    main(sys.argv[1:])
