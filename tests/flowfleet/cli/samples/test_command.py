"""`flowfleet samples` that writes a page, against a real controller process."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flowfleet.api.jobs import Job
from flowfleet.cli import main as cli
from flowfleet.cli.samples import command as cli_samples
from flowfleet.client.client import Client
from flowfleet.data.blobs import open_blobs
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.flowfleet.idle_controller import in_store, job_settings

Run = Callable[..., Result]
GROUP = 6
CLIP = (0.9, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Against rewards that rise with the index: sample 0 has the highest, and the lowest reward."""


@pytest.fixture
def run(api_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command in an empty directory, pointed at the controller."""
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli.app, ["samples", *words])


@pytest.fixture
def job(api_url: str, redis_url: str, tmp_path: Path) -> Job:
    """A job with two groups of six at steps 3 and 4; of sample 4/0/5 the picture is no longer kept."""
    with Client(api_url) as client:
        job = client.submit(job_settings(tmp_path))

    async def fill(store: Store) -> None:
        blobs = open_blobs(store.link.redis)
        for step in (3, 4):
            for index in range(GROUP):
                ref = await blobs.put(keys.blob(job.id, "media", step, index), f"{step}/{index}".encode(), ttl_s=60)
                scores: dict[str, float | None] = {
                    "ocr": step + index / 10,
                    **({"clip": CLIP[index]} if step == 4 else {}),
                }
                gone = (step, index) == (4, 5)
                media: dict[str, Any] = {
                    "media_uri": ref.uri + "gone" * gone,
                    "media_size_bytes": ref.size_bytes,
                    "media_sha256": ref.sha256,
                }
                reward = scores["ocr"]
                sample = SampleRecord(
                    step=step, group=0, index=index, prompt="a <b> sign", reward=reward, scores=scores, **media
                )
                await store.samples.put(job.id, sample)

    in_store(redis_url, fill)
    return job


def pictures(page: str) -> list[str]:
    """What the pictures' files hold, in the page's order."""
    return [base64.b64decode(data).decode() for data in re.findall(r'src="data:image/png;base64,([^"]*)"', page)]


def ranks(page: str) -> list[str]:
    return re.findall(r">(#\d+)</span>", page)


def test_the_worst_with_the_others_of_their_group(run: Run, job: Job) -> None:
    result = run(job.id, "--worst", "2")
    assert result.exit_code == 0, result.output
    file = Path("runs/samples") / job.id[:13] / "worst.html"
    assert result.stdout.startswith(str(file))
    page = file.read_text()
    assert pictures(page) == [f"4/{index}" for index in (4, 3, 2, 1, 0)]  # not the first step's, which are always low
    assert ranks(page) == ["#2", "#1"]
    assert "a &lt;b&gt; sign" in page


def test_the_best_of_a_step_where_one_wants_it(run: Run, job: Job) -> None:
    assert run(job.id, "--best", "200", "--step", "4", "--out", "a/best.html").exit_code == 0
    page = Path("a/best.html").read_text()
    assert len(ranks(page)) == GROUP
    assert pictures(page) == [f"4/{index}" for index in (4, 3, 2, 1, 0)]
    assert page.count("no longer kept") == 1
    assert "The highest rewards of step 4" in page


def test_disagreement_shows_who_says_what(run: Run, job: Job) -> None:
    """Sample 0 of the second group is ranked lowest by ocr and highest by clip."""
    assert run(job.id, "--disagree", "1", "--out", "page.html").exit_code == 0
    page = Path("page.html").read_text()
    assert "clip puts it 1 of 6, ocr puts it 6 of 6: 1.00 apart" in page
    assert ranks(page) == ["#1"]


def test_a_large_page_leaves_out_what_was_not_asked_for(run: Run, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_samples, "ROOM_BYTES", 7)
    assert run(job.id, "--worst", "1", "--out", "page.html").exit_code == 0
    assert len(pictures(Path("page.html").read_text())) == 3  # 3 bytes each


def test_open_shows_it_in_the_browser(run: Run, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run(job.id, "--worst", "1", "--out", "page.html", "--open").exit_code == 0
    assert opened == [Path("page.html").resolve().as_uri()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--worst", "1", "--best", "1"], "--worst and --best: give one of them"),
        (["--worst", "1", "--limit", "3"], "--order and --limit are for downloads"),
        (["--open"], "give --worst, --best or --disagree"),
        (["--worst", "1", "--out", "pictures"], "--out pictures: name the page"),
        (["--worst", "1", "--step", "99"], "no train samples of step 99"),
        (["--disagree", "1", "--step", "3"], "no two scorers scored the same sample"),
        (["--best", "1", "--purpose", "odd"], "purpose"),
    ],
)
def test_mistakes_are_told(run: Run, job: Job, words: list[str], told: str) -> None:
    result = run(job.id, *words)
    assert result.exit_code == 1
    assert told in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
