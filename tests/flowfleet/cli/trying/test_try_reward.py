"""`flowfleet try-reward` with a real reward service, and what it says of a job's samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from flowfleet.cli import main as cli
from flowfleet.cli.trying.scoring import Tried, compared
from flowfleet.cli.trying.service import parse_tried, serving
from flowfleet.client.client import Client
from flowfleet.data.blobs import open_blobs
from flowfleet.local.rewards import Reward
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.flowfleet.idle_controller import in_store, job_settings

FUNCTION = """
def points(picture, prompt, metadata):
    return picture.width / float(metadata["per"])
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    Image.new("RGB", (40, 8), "red").save(tmp_path / "red.png")
    return lambda *words: CliRunner().invoke(cli.app, ["try-reward", *words])


def test_files_and_a_jobs_samples_are_scored(
    run: Callable[..., Result], api_url: str, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.csv").write_text("prompt,per\na,40\n")
    (tmp_path / "more.csv").write_text("prompt,per\nb,80\n")
    sources = [{"name": name, "path": str(tmp_path / f"{name}.csv")} for name in ("prompts", "more")]
    settings = job_settings(tmp_path) | {"data": {"sources": sources}}
    with Client(api_url) as client:
        job = client.submit(settings)

    async def fill(store: Store) -> None:
        media = (tmp_path / "red.png").read_bytes()
        for index, (prompt, score) in enumerate([("a", 0.75), ("b", 0.25)]):
            ref = await open_blobs(store.link.redis).put(keys.blob(job.id, "media", index), media, ttl_s=60)
            place: dict[str, Any] = {"media_uri": ref.uri, "media_size_bytes": ref.size_bytes}
            sample = SampleRecord(
                step=0, group=index, index=0, prompt=prompt, scores={"ocr": score}, media_sha256=ref.sha256, **place
            )
            await store.samples.put(job.id, sample)

    in_store(redis_url, fill)
    with serving(parse_tried("mine.py:points"), 60) as address:
        of_file = run(address, "red.png", "--metadata", "per=80", "--json")
        of_job = run(address, "--job", job.id, "--url", api_url, "--json")
        shown = run(f"grpc://{address}", "--job", job.id, "--url", api_url).stdout
        wrong = run(address, "red.png")

    assert [one["score"] for one in json.loads(of_file.stdout)["samples"]] == [0.5]
    found = json.loads(of_job.stdout)
    assert {one["sample"]: (one["score"], one["stored"]) for one in found["samples"]} == {
        "0/0/0": (1.0, 0.75),
        "0/1/0": (0.5, 0.25),
    }
    assert (found["mean"], found["stored_mean"]) == (0.75, 0.5)
    assert (found["largest_difference"], found["rank_correlation"]) == (0.25, pytest.approx(1.0))
    assert "stored mean 0.500, largest difference 0.250, rank correlation 1.000" in " ".join(shown.split())
    assert (wrong.exit_code, "KeyError" in wrong.stdout) == (1, True)


def test_a_service_that_does_not_start_says_why(run: Callable[..., Result]) -> None:
    done = run("jpeg_compressibility:quality=3", "red.png")
    assert done.exit_code == 1
    assert "did not start" in done.stderr
    assert "settings.quality: unknown setting" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ocr"], "give files to score, or the job"),
        (["ocr", "red.png", "--job", "last"], "give files to score, or the job"),
        (["ocr", "mine.py"], "give a file that ends in"),
        (["absent.py:points", "red.png"], "there is no file absent.py"),
        (["beauty", "red.png"], "give a scorer"),
        (["127.0.0.1:9", "red.png", "--timeout", "5"], "127.0.0.1:9: UNAVAILABLE"),
    ],
)
def test_mistakes_are_told_in_words(run: Callable[..., Result], words: list[str], message: str) -> None:
    done = run(*words)
    assert (done.exit_code, message in " ".join(done.stderr.split())) == (1, True), done.output


def test_what_may_be_tried(run: Callable[..., Result]) -> None:
    assert parse_tried("host:70") == Reward("reward", address="host:70")
    assert parse_tried("grpcs://host:70") == Reward("reward", address="grpcs://host:70")
    assert parse_tried("mine.py:points").scorer == "python"
    assert parse_tried("clip:model=/m") == Reward("clip", "clip", ("model=/m",))


def test_a_comparison_is_over_samples_with_both_scores() -> None:
    rows = [Tried("a", 1.0, stored=3.0), Tried("b", 2.0, stored=2.0), Tried("c", 3.0, stored=1.0), Tried("d", 9.0)]
    found = compared("x 1", rows)
    assert (found.mean, found.stored_mean, found.largest_difference) == (2.0, 2.0, 2.0)
    assert found.rank_correlation == pytest.approx(-1.0)
    alone = compared("x 1", [Tried("a", None, "broken"), Tried("b", 4.0)])
    assert (alone.mean, alone.stored_mean, alone.rank_correlation) == (4.0, None, None)
