"""`docker/build` with a real builder: a small image, its bill of materials, and a registry that it is pushed to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import Rendered, container

ROOT = Path(__file__).parents[2]
SITE = "opt/flowfleet/lib/python3.11/site-packages"
FILES = {
    f"{SITE}/grpcio-1.85.1.dist-info/METADATA": "Name: grpcio\nVersion: 1.85.1\nRequires-Dist: typing-extensions\n",
    f"{SITE}/typing_extensions-4.15.0.dist-info/METADATA": "Name: typing_extensions\nVersion: 4.15.0\n",
    "usr/local/lib/python3.11/site-packages/pip-26.3.dist-info/METADATA": "Name: pip\nVersion: 26.3\n",
}
PACKAGES = {
    "pkg:pypi/grpcio@1.85.1",
    "pkg:pypi/typing-extensions@4.15.0",
    "pkg:pypi/pip@26.3",
}


class Registry(BaseHTTPRequestHandler):
    """Takes one image after the other, as a registry does."""

    blobs: dict[str, bytes]
    manifests: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        self._answer(200 if self.path.rpartition("/")[2] in self.blobs else 404)

    def do_POST(self) -> None:
        self._answer(202, Location="/v2/uploads/1?x=1")

    def do_PATCH(self) -> None:
        self.blobs["sent"] = self._body()
        self._answer(202, Location="/v2/uploads/1?x=1", Range=f"0-{len(self.blobs['sent']) - 1}")

    def do_PUT(self) -> None:
        body = self._body()
        if "/manifests/" in self.path:
            self.manifests[self.path] = body
        else:
            self.blobs[self.path.partition("digest=")[2].replace("%3A", ":")] = self.blobs.pop("sent", b"") + body
        self._answer(201)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def registry() -> Iterator[tuple[str, type[Registry]]]:
    """Its address, and what it got."""
    kept = type("Kept", (Registry,), {"blobs": {}, "manifests": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), kept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", kept
        server.shutdown()


def lay_out(root: Path) -> None:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def packages(text: str) -> set[str]:
    """Lists the packages of a bill of materials, once it is valid."""
    from cyclonedx.schema import SchemaVersion  # four seconds of imports, in each worker that collects this file
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return {component["purl"] for component in json.loads(text)["components"]}


def test_the_bill_lists_the_packages_of_python(tmp_path: Path) -> None:
    lay_out(tmp_path)
    found = re.search(r"^sbom\(\) \{.*?^\}", (ROOT / "docker/build").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    given = {"python": sys.executable, "work": str(tmp_path), "told": str(tmp_path / "image")}
    subprocess.run(["bash", "-euc", f'{found[0]}; sbom "{tmp_path}"'], env={**os.environ, **given}, check=True)
    assert_bill((tmp_path / "image.cdx.json").read_text())


def assert_bill(text: str) -> None:
    assert packages(text) == PACKAGES
    depends = {entry["ref"]: entry.get("dependsOn", []) for entry in json.loads(text)["dependencies"]}
    assert depends["grpcio==1.85.1"] == ["typing_extensions==4.15.0"]


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("buildah") is None or os.geteuid() != 0,
    reason="needs root and buildah: install it",
)
def test_a_built_image_has_its_bill_its_id_and_the_digest_that_the_registry_knows(
    tmp_path: Path, registry: tuple[str, type[Registry]]
) -> None:
    address, kept = registry
    work = tmp_path / "work"
    lay_out(work / "files")
    (work / "docker").mkdir()
    shutil.copy(ROOT / "docker/build", work / "docker/build")
    (work / "docker/reward-models.Dockerfile").write_text("FROM scratch\nCOPY files /\n")
    (work / "pyproject.toml").write_text('version = "7.8"\n')
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    given = {"CONTAINERS_STORAGE_CONF": f"{tmp_path}/storage.conf", "STORAGE_DRIVER": "vfs", "PREFIX": f"{address}/ml/"}
    environment = {**os.environ, **given, "PUSH": "1", "PUSH_FLAGS": "--tls-verify=false", "OUT": f"{tmp_path}/out"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["docker/build", "reward-models"], cwd=work, env={**environment, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    image = f"{address}/ml/flowfleet-reward-models"
    ((place, manifest),) = kept.manifests.items()
    assert place == "/v2/ml/flowfleet-reward-models/manifests/7.8"
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    values = yaml.safe_load((tmp_path / "out/images.yaml").read_text())
    assert values == {"images": {"rewardModels": f"{image}@{digest}"}}

    image_id = (tmp_path / "out/reward-models.id").read_text().strip()
    assert image_id == json.loads(manifest)["config"]["digest"]
    assert_bill((tmp_path / "out/reward-models.cdx.json").read_text())

    if shutil.which("helm"):
        reward = 'rewards=[{"name":"taste","scorer":"clip"}]'
        rendered = Rendered("nvidia", reward, f"images={json.dumps(values['images'])}")
        assert container(rendered.pod("reward-taste"))["image"] == f"{image}@{digest}"
