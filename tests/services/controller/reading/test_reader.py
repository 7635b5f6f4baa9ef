"""The reader: what it reads, and what it cannot, tried from inside it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from flowfleet.prompts.columns import Columns
from flowfleet.prompts.stores import read_prompts
from services.controller.prompts.sources import MAX_PROMPT_BYTES, Sources, Unread
from services.controller.reading.confinement import is_public
from services.controller.reading.places import NotAllowed, Places
from services.controller.reading.reader import clean_environment

LOOPBACK = "127.0.0.0/8"


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ways = {
            "/here": (302, "/a.txt"),
            "/loop": (302, "/loop"),
            "/elsewhere": (302, "http://localhost:1/secret"),
            "/metadata": (302, "http://169.254.169.254/latest/meta-data"),
            "/file": (302, "file:///etc/passwd"),
        }
        status, location = ways.get(self.path, (200 if self.path.startswith("/a.txt") else 404, ""))
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        body = b"a prompt\n" if status == 200 else b""
        self.send_header("Content-Length", str(len(body) + (5 if self.path == "/a.txt?cut" else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def open_sources(site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    """Loopback is listed."""
    folder = tmp_path_factory.mktemp("data")
    port = site.rpartition(":")[2]
    urls = [site, f"http://localhost:{port}"]
    sources = Sources(Places.of([folder], urls, folder / "state"), [LOOPBACK, "::1/128"])
    yield sources
    sources.close()


def test_files_and_pictures_are_read(tmp_path: Path) -> None:
    sources = Sources(Places.of([tmp_path], [], tmp_path / "state"))
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    assert sources.read(str(tmp_path / "a.txt"), 4) == b"0123"
    assert sources.read(str(tmp_path / "a.txt"), 99) == b"0123456789"
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    assert sources.picture_size(str(tmp_path / "a.png"), "image/png") == (30, 20)
    with pytest.raises(ValueError, match=r"a\.txt is not a readable image/png"):
        sources.picture_size(str(tmp_path / "a.txt"), "image/png")
    with pytest.raises(FileNotFoundError):
        sources.read(str(tmp_path / "gone.txt"), 4)
    sources.close()


def test_a_folder_called_services_where_the_controller_starts_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "a.txt").write_bytes(b"a prompt")
    code = f"""
import sys
from pathlib import Path
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places
folder = Path({str(tmp_path)!r})
sources = Sources(Places.of([folder], [], folder / "state"))
print(sources.prompts(str(folder / "a.txt"))[0].text)
sources.close()
"""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "a prompt\n"), done.stderr


def test_prompts_that_may_be_read_later_are_told_from_those_that_are_missing(open_sources: Sources, site: str) -> None:
    with pytest.raises(Unread, match="ended after 9 of 14 bytes"):
        open_sources.prompts(f"{site}/a.txt?cut")
    with pytest.raises(ValueError, match="404") as missing:
        open_sources.prompts(f"{site}/gone.txt")
    assert not isinstance(missing.value, Unread)


def test_a_file_that_is_too_large_for_prompts_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(Places.of([tmp_path], [], tmp_path / "state"))
    with (tmp_path / "weights.txt").open("wb") as file:
        file.truncate(MAX_PROMPT_BYTES + 1)
    monkeypatch.setattr(sources.reader, "ask", lambda *_: pytest.fail("was read"))
    with pytest.raises(ValueError, match="is too large: a prompt file has at most"):
        sources.prompts(str(tmp_path / "weights.txt"))


def test_a_reader_that_died_is_replaced(tmp_path: Path) -> None:
    sources = Sources(Places.of([tmp_path], [], tmp_path / "state"))
    (tmp_path / "a.txt").write_bytes(b"a")
    assert sources.read(str(tmp_path / "a.txt"), 4) == b"a"
    process = sources.reader._idle[0]
    process._process.kill()
    process._process.wait()
    with pytest.raises(OSError, match="did not answer"):
        sources.read(str(tmp_path / "a.txt"), 4)
    assert sources.read(str(tmp_path / "a.txt"), 4) == b"a"
    (last,) = sources.reader._idle
    sources.close()
    assert last._process.returncode is not None


def test_urls_are_read_from_listed_hosts_alone(open_sources: Sources, site: str) -> None:
    assert open_sources.read(f"{site}/a.txt", 99) == b"a prompt\n"
    assert open_sources.read(f"{site}/here", 99) == b"a prompt\n"
    assert open_sources.read(f"{site.replace('127.0.0.1', 'localhost')}/a.txt", 3) == b"a p"
    with pytest.raises(FileNotFoundError):
        open_sources.read(f"{site}/b.txt", 99)
    for path, words in (
        ("/elsewhere", "redirects to http://localhost:1"),
        ("/metadata", "redirects to http://169.254.169.254"),
        ("/file", "redirects to a URL that may not be read"),
        ("/loop", "more than 5 times"),
        ("/a.txt?cut", "ended after 9 of 14 bytes"),
    ):
        with pytest.raises(OSError, match=words):
            open_sources.read(f"{site}{path}", 99)
    with pytest.raises(NotAllowed):
        open_sources.read("http://127.0.0.1:1/a.txt", 99)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_name_that_leads_inside_is_not_followed(site: str, tmp_path: Path, host: str) -> None:
    """The address that is connected to counts, whatever the name said before: DNS may give another answer."""
    url = site.replace("127.0.0.1", host)
    sources = Sources(Places.of([tmp_path], [url], tmp_path / "state"))
    with pytest.raises(OSError, match=r"is no public address: .* --data-network"):
        sources.read(f"{url}/a.txt", 99)
    sources.close()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.96.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.168.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::1", False),
        ("168.63.129.16", False),
        ("192.0.0.192", False),
        ("fec0::1", False),
        ("::a9fe:a9fe", False),
        ("::ffff:0:a9fe:a9fe", False),
        ("localhost", False),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_reader_has_none_of_the_controllers_secrets() -> None:
    secrets = {"FLOWFLEET_REDIS_URL": "r", "FLOWFLEET_API_KEY": "k", "FLOWFLEET_RPC_TOKEN": "t"}
    secrets["AWS_SECRET_ACCESS_KEY"] = "controller's"
    own = {"FLOWFLEET_READER_AWS_SECRET_ACCESS_KEY": "reader's"}
    found = clean_environment({"PATH": "/bin", **secrets, **own})
    python = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"}
    assert set(found) == {"PATH", "HOME", *python, "ARROW_DEFAULT_MEMORY_POOL", "AWS_SECRET_ACCESS_KEY"}
    assert found["AWS_SECRET_ACCESS_KEY"] == "reader's"


@pytest.mark.parametrize("user", ["own", "same"])
def test_from_inside_the_controllers_secrets_cannot_be_got(tmp_path: Path, user: str) -> None:
    """A controller with a secret in its environment, memory and a file; a reader tries all three, by Python and by the
    C library. `own` is this test's uid, from which a reader of root's departs; `same` an ordinary one for both."""
    if user == "same" and os.geteuid() != 0:
        pytest.skip("needs root, who may become another user: run the tests as root")
    command = [sys.executable, "-m", "tests.services.controller.hostile_reader", user, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "SECRET": "hunter2"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == {"environ": "read", "mem": "read", "token": "read"}
    expected = dict.fromkeys(("environ", "mem", "token", "environ by C", "mem by C"), "refused")
    if found["kernel"]:  # another uid, or Landlock
        expected |= {"token by C": "refused"}
    assert {name: found["after"][name] for name in expected} == expected
    assert found["after"]["program"] == found["after"]["connect"] == found["after"]["unix"] == "refused"


def test_tables_and_saved_data_sets_are_read(tmp_path: Path) -> None:
    """A folder as `Dataset.save_to_disk` writes it; the rows of its files follow each other."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = [pa.Table.from_pylist([{"prompt": text, "n": 1}]) for text in ("a", "b")]
    pq.write_table(tables[0], tmp_path / "a.Parquet")
    folder = tmp_path / "saved"
    folder.mkdir()
    for number, table in enumerate(tables):
        with (
            pa.OSFile(str(folder / f"data-{number}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as out,
        ):
            out.write_table(table)
    state = {"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    sources = Sources(Places.of([tmp_path], [], tmp_path / "state"))
    try:
        assert [prompt.text for prompt in sources.prompts(str(folder))] == ["a", "b"]
        assert sources.first_prompt(str(folder)).metadata == {"n": "1"}
        assert sources.prompts(str(tmp_path / "a.Parquet"))[0].source.endswith("a.Parquet:1")
        (folder / "data-1.arrow").unlink()
        (folder / "data-1.arrow").symlink_to("/etc/passwd")
        with pytest.raises(NotAllowed):
            sources.prompts(str(folder))
        for note, words in (
            ("{}", rf"holds several splits: name one, as in {folder}/train"),
            ('{"splits": ["train", "test"]}', rf"holds several splits: name one, {folder}/train, {folder}/test$"),
        ):
            (folder / "dataset_dict.json").write_text(note)
            for read in (sources.prompts, lambda place: read_prompts(place, Columns())):
                with pytest.raises(ValueError, match=words):
                    read(f"{folder}/")
        (tmp_path / "a.parquet").write_text("prompt\n")
        with pytest.raises(ValueError, match="no readable parquet file"):
            sources.prompts(str(tmp_path / "a.parquet"))
    finally:
        sources.close()
