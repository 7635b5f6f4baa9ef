"""Serves the live page: `/`, and its files below `/page/`.

The page names its files by a digest of all of them, so browsers keep them for a year and never mix two releases. A
digest of another release gets this release's file, uncached: during an upgrade two controllers answer one browser.
"""

import hashlib
import mimetypes
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response

from flowfleet.errors import NotFound

router = APIRouter(include_in_schema=False)

INDEX = "index.html"
PREFIX = b'"/page/'
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
FOREVER = "public, max-age=31536000, immutable"
AGAIN = "no-cache"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class Files:
    """The page's files, read once."""

    def __init__(self, root: Traversable) -> None:
        self._files = dict(_read(root))
        every = hashlib.sha256()
        for name, content in sorted(self._files.items()):
            every.update(f"{name}\0{len(content)}\0".encode() + content)
        self.digest = every.hexdigest()[:16]

    def index(self) -> bytes:
        """The page, whose files are named by digest."""
        return self._files[INDEX].replace(PREFIX, PREFIX + self.digest.encode() + b"/")

    def get(self, name: str) -> bytes:
        """Raises NotFound."""
        if name == INDEX or name not in self._files:
            raise NotFound(f"the page has no file {name[:200]!r}")
        return self._files[name]


@cache
def page_files() -> Files:
    return Files(resources.files("services.controller.page") / "static")


@router.get("/")
async def index(request: Request) -> Response:
    return _answer(request, page_files().index(), "text/html", AGAIN)


@router.get("/page/{name:path}")
async def file(request: Request, name: str) -> Response:
    files = page_files()
    digest, _, rest = name.partition("/")
    is_named = len(digest) == len(files.digest) and rest and all(sign in "0123456789abcdef" for sign in digest)
    path = rest if is_named else name
    return _answer(request, files.get(path), media_type(path), FOREVER if digest == files.digest else AGAIN)


def media_type(name: str) -> str:
    suffix = "." + name.rpartition(".")[2]
    return _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"


def _answer(request: Request, content: bytes, kind: str, caching: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag, "Cache-Control": caching}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def _read(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        else:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found
