"""What a client gives a notebook: frames, pictures, a job as a table; and whose controller it finds there."""

import io
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from flowfleet.api.answers import read
from flowfleet.api.jobs import Job, MetricsRow
from flowfleet.api.samples import Sample
from flowfleet.client import Client
from flowfleet.client.connection import DEFAULT_URL, controller_url
from flowfleet.client.frames import metrics_frame, samples_frame
from flowfleet.extras import pip_install
from flowfleet.local.stack import Stack, StateDir

SAMPLE: dict[str, Any] = {"step": 3, "group": 1, "index": 0, "prompt": "a <b>", "reward": 0.5, "scores": {"ocr": 0.5}}


def client(media_type: str = "image/png") -> Client:
    picture = io.BytesIO()
    Image.new("RGBA", (4, 2), (255, 0, 0, 255)).save(picture, "PNG")

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/media"):
            return httpx.Response(200, content=picture.getvalue())
        return httpx.Response(200, json={"items": [SAMPLE | {"media_type": media_type}], "next_cursor": None})

    return Client("http://x", transport=httpx.MockTransport(answer))


def test_a_sample_shows_its_picture() -> None:
    (sample,) = client().samples("j")
    image = sample.image()
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 2), (255, 0, 0))
    assert sample == read(Sample, SAMPLE)  # which picture it shows is no part of it
    (video,) = client("video/mp4").samples("j")
    with pytest.raises(ValueError, match="`media` gives its file"):
        video.image()
    with pytest.raises(ValueError, match="only samples that a client gave"):
        read(Sample, SAMPLE).image()


def test_frames() -> None:
    pytest.importorskip("pandas", reason="pip install pandas")
    rows = [MetricsRow(step=0, values={"a": 1.0}), MetricsRow(step=1, values={"a": 2.0, "b": None})]
    frame = metrics_frame(rows)
    assert list(frame.index) == [0, 1]
    assert list(frame["a"]) == [1.0, 2.0]
    assert frame["b"].isna().all()
    samples = samples_frame([read(Sample, SAMPLE)])
    assert samples.loc[0, "scores.ocr"] == 0.5
    assert samples.loc[0, "prompt"] == "a <b>"
    assert (len(metrics_frame([])), len(samples_frame([]))) == (0, 0)
    assert list(client().samples_frame("j")["reward"]) == [0.5]


def test_frames_without_pandas_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ValueError, match=re.escape(pip_install("notebook"))):
        metrics_frame([])


def test_a_job_is_a_table_in_a_notebook() -> None:
    facts = {"id": "j", "name": "<mine>", "status": "failed", "reason": "a < b", "desired": "running", "spec": {}}
    job = read(Job, facts | {"created_at": datetime.now(UTC), "progress": {"step": 2, "steps": 9, "reward": 0.25}})
    html = job._repr_html_()
    for words in ("&lt;mine&gt;", "failed: a &lt; b", "2 of 9", "0.250"):
        assert words in html
    assert "held-out" not in html


def test_a_client_finds_the_stack_that_the_command_line_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWFLEET_URL", raising=False)
    assert controller_url() == DEFAULT_URL
    state = StateDir(Path("runs/local"))
    with state.lock():
        url = "http://127.0.0.1:20123"
        state.write(
            Stack(url=url, redis_url="redis://x", state_dir=str(state.path), supervisor=os.getpid(), processes={})
        )
        assert Client().url == url
        assert Client("http://given/").url == "http://given"
        monkeypatch.setenv("FLOWFLEET_URL", "http://named")
        assert Client().url == "http://named"
    monkeypatch.delenv("FLOWFLEET_URL")
    assert Client().url == DEFAULT_URL
