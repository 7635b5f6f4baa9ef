"""A stand-in of the Hub's HTTP API: it lists and serves the data sets and models of a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_site(root: Path, commit: list[str] | None = None, asked: list[str] | None = None) -> Iterator[str]:
    """Serves `root`/ORG/NAME as data sets and as models; yields the endpoint. `commit` holds that of every repository,
    and may change; `asked` gets the path of each request."""
    commits = commit or [COMMIT]

    class Site(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._serve(with_body=False)

        def do_GET(self) -> None:
            self._serve(with_body=True)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            folder = root.joinpath(*_parts(self.path)[2:4])
            self._send(200, json.dumps([_entry(folder / path, folder) for path in asked["paths"]]).encode(), True)

        def _serve(self, *, with_body: bool) -> None:
            if asked is not None:
                asked.append(self.path)
            parts = _parts(self.path)
            is_api, kinds = parts[0] == "api", ("datasets", "models")
            named = parts[1:] if is_api else parts if parts[0] in kinds else ["models", *parts]
            kind, organization, name, *rest = named
            folder = root / organization / name
            known = ("main", *commits, None)
            if kind not in kinds or not folder.is_dir():
                self._send(404, b'{"error": "Repository not found"}', with_body, {"X-Error-Code": "RepoNotFound"})
            elif (rest[1] if len(rest) > 1 else None) not in known:
                self._send(404, b'{"error": "Invalid rev"}', with_body, {"X-Error-Code": "RevisionNotFound"})
            elif (parts[0] == "api" and not rest) or (parts[0] == "api" and rest[0] == "revision"):
                self._json({"id": f"{organization}/{name}", "sha": commits[0], "siblings": []}, with_body)
            elif parts[0] == "api" and rest[0] == "tree":
                self._json([_entry(path, folder) for path in sorted(folder.rglob("*"))], with_body)
            else:
                self._file(folder.joinpath(*rest[2:]), with_body)

        def _file(self, path: Path, with_body: bool) -> None:
            if not path.is_file():
                self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound"})
                return
            data, asked = path.read_bytes(), self.headers.get("Range", "")
            first, last = 0, len(data) - 1
            if asked:
                first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            etag = hashlib.sha1(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commits[0], "Accept-Ranges": "bytes"}
            if asked:
                headers["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
            self._send(206 if asked else 200, data[first : last + 1], with_body, headers)

        def _json(self, found: Any, with_body: bool) -> None:
            self._send(200, json.dumps(found).encode(), with_body)

        def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A reader that has seen enough closes the connection."""

    server = Server(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _parts(path: str) -> list[str]:
    return [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": "d", "path": name}
    return {"type": "file", "oid": "f", "size": path.stat().st_size, "path": name}
