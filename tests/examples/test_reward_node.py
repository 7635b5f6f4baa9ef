"""The Node example: its own tests, its types, and the contract that it was written from."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from PIL import Image

from flowfleet import conformance
from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from tests.examples import reward_node
from tests.examples.reward_node import EXAMPLE, ROOT, node


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    reward_node.install()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """host:port of the service."""
    with reward_node.running() as (_, address):
        yield address


def picture(colour: str, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(file, kind)
    return file.getvalue()


def test_its_own_tests_pass() -> None:
    printed = node("--test", "--test-reporter", "tap", *sorted(str(path) for path in EXAMPLE.glob("test/*.test.ts")))
    assert re.search(r"^# fail 0$", printed, re.MULTILINE), printed
    assert int(re.findall(r"^# pass (\d+)$", printed, re.MULTILINE)[0]) >= 15


def test_its_types_check() -> None:
    node("node_modules/typescript/bin/tsc")


def test_versions_are_pinned() -> None:
    package = json.loads((EXAMPLE / "package.json").read_text())
    locked = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    for name, version in (package["dependencies"] | package["devDependencies"]).items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert locked[f"node_modules/{name}"]["version"] == version
    assert all(entry.get("integrity") for name, entry in locked.items() if name)


def test_it_keeps_to_the_contract(service: str) -> None:
    report = conformance.run(f"grpc://{service}", conformance.Options(allowed_s=30.0))
    assert report.ok, report.text()


def test_our_client_gets_the_scores_of_the_formula(service: str) -> None:
    """White against black and gray, 1 − d / D; what cannot be scored says why."""
    media = {"white": ("#ffffff", "PNG"), "gray": ("#808080", "PNG"), "black": ("#000000", "JPEG")}
    samples = [
        RewardSample(sample_id=name, media=picture(*how), media_type=f"image/{how[1].lower()}")
        for name, how in media.items()
    ]
    samples.append(RewardSample(sample_id="bild/ü", media=b"", media_type="image/png"))
    with grpc.insecure_channel(service) as channel:
        request = ScoreRequest(samples=samples, params={"target": "#ffffff"})
        response = RewardServiceStub(channel).Score(request, timeout=30)
    by_id = {score.sample_id: score for score in response.scores}
    assert {name: round(by_id[name].score, 9) for name in media} == {
        "white": 1.0,
        "gray": round(128 / 255, 9),
        "black": 0.0,
    }
    assert by_id["gray"].components["brightness"] == pytest.approx(128 / 255)
    assert "not a whole image/png" in by_id["bild/ü"].error
    assert response.version == json.loads((EXAMPLE / "package.json").read_text())["version"]


def test_sigterm_ends_it_well() -> None:
    with reward_node.running() as (process, _):
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    assert printed.endswith("stopped\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "99999"], "--port 99999: give 0 to 65535"),
        (["--host", "0.0.0.0"], "set FLOWFLEET_RPC_TOKEN"),
        (["--proto", "absent.proto"], "absent.proto"),
        (["--prot", "x"], "--prot"),
    ],
)
def test_bad_flags_are_told(flags: list[str], told: str) -> None:
    argv = [str(reward_node.NODE), "src/main.ts", *flags]
    done = subprocess.run(argv, cwd=EXAMPLE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert told in done.stderr


def test_the_image_gets_the_contract_and_the_example_alone() -> None:
    """What the Dockerfile copies exists, and its own .dockerignore lets in that and nothing else."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (EXAMPLE / "Dockerfile").read_text(), re.MULTILINE)
    sources = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in sources)
    ignored = (EXAMPLE / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == sources
    assert [line for line in ignored if line and line[0] not in "!#"] == ["*"]


def test_links_of_its_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (EXAMPLE / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not Path(EXAMPLE / link).exists()] == []
