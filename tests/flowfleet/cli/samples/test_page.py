"""The page of samples: it loads nothing, runs nothing, and shows what it was given."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from flowfleet.api.samples import Sample
from flowfleet.cli.samples.page import Shown, page, tag

FACTS: dict[str, Any] = {"id": "a" * 8, "name": "tiny", "status": "running", "desired": "running", "spec": {}}
JOB = Job(**FACTS, created_at=datetime.now(UTC))
HOSTILE = """</title></style><script>alert(1)</script> "><img src=x onerror='alert(1)'> &amp; {{x}} ä 猫"""


class Read(HTMLParser):
    """Elements with attributes, and the text outside of <style>."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def all(self, name: str, **attributes: str) -> list[dict[str, str | None]]:
        return [have for at, have in self.elements if at == name and attributes.items() <= have.items()]


def shown(index: int = 0, rank: int | None = 1, media: bytes | None = b"png", **fields: Any) -> Shown:
    facts = {"step": 3, "group": 0, "index": index, "prompt": "a sign", "reward": 0.5, "scores": {"ocr": 0.5}} | fields
    return Shown(Sample.model_validate(facts), media, rank)


def test_hostile_text_stays_text() -> None:
    """In every place that the job's author, a scorer or a file chooses."""
    fields: dict[str, Any] = {
        "prompt": HOSTILE,
        "scores": {HOSTILE: 0.5},
        "versions": {HOSTILE: HOSTILE},
        "shadow": {HOSTILE: 0.5},
        "drop_reason": HOSTILE,
        "gated_by": HOSTILE,
        "media_type": HOSTILE,
    }
    picture = Shown(shown(1, prompt=HOSTILE).sample, b"png", 2, HOSTILE)
    read = Read(page(JOB.model_copy(update={"name": HOSTILE}), HOSTILE, [shown(**fields), picture], HOSTILE))
    assert read.open == []
    assert not read.all("script")
    assert len(read.all("img")) == 1
    assert not [have for _, have in read.elements if any(name.startswith("on") for name in have)]
    assert read.all("img")[0]["alt"] == HOSTILE
    assert read.words.count(HOSTILE) >= 6


def test_it_is_complete_in_itself() -> None:
    text = page(JOB, "Worst", [shown(), shown(1, media_type="video/mp4", media=b"film")])
    read = Read(text)
    assert [have["src"] for have in read.all("img")] == [f"data:image/png;base64,{base64.b64encode(b'png').decode()}"]
    assert [have["src"] for have in read.all("video")] == [
        f"data:video/mp4;base64,{base64.b64encode(b'film').decode()}"
    ]
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text)
    assert not read.all("link")
    (policy,) = read.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert (policy["content"] or "").startswith("default-src 'none';")


def test_a_card_says_all_that_is_known() -> None:
    sample = shown(
        7,
        rank=4,
        reward=None,
        scores={"ocr": 0.25, "ocr.exact": 1.0, "jpeg": -30.0},
        versions={"ocr": "ocr 1.2", "clip": "openai 3"},
        shadow={"ocr2": 0.75},
        seed=99,
        policy_version=2,
        drop_reason="no_score_clip",
        gated_by="guard",
    )
    words = " ".join(Read(page(JOB, "Worst", [sample])).words)
    for said in (
        "#4",
        "0.250",
        "1.000",
        "-30.000",
        "0.750",
        "ocr2 (shadow)",
        "ocr 1.2",
        "clip: openai 3",
        "seed 99",
        "policy 2",
        "step 3",
        "group 0",
        "sample 7",
        "no reward",
        "not trained on: no_score_clip",
        "gated by guard",
    ):
        assert said in words, said


def test_a_groups_strip_has_a_tick_a_reward() -> None:
    """The strip is 200 units wide for 0 to 1."""
    read = Read(page(JOB, "", [shown(0), shown(1, None, reward=0.25), shown(2, None, reward=None)]))
    assert [have["x1"] for have in read.all("line")] == ["0", "100.0", "50.0"]
    assert len(read.all("line", **{"class": "picked"})) == 1


def bars(text: str) -> list[str | None]:
    return [have["style"] for have in Read(text).all("i")]


def test_bars_are_to_scale() -> None:
    """0 to 1 for what is inside of it; else from the least to the greatest on the page, with 0 among them."""
    both = [shown(0, scores={"ocr": 0.25, "x": -3.0}), shown(1, reward=0.4, scores={"ocr": 1.0, "x": 1.0})]
    assert bars(page(JOB, "", both)) == [
        "left: 0.0%; width: 25.0%",
        "left: 0.0%; width: 75.0%",
        "left: 0.0%; width: 100.0%",
        "left: 75.0%; width: 25.0%",
    ]


def test_groups_stand_together_by_their_best_rank_and_members_by_reward() -> None:
    cards = [
        shown(0, None, group=1, reward=0.1),
        shown(1, 2, group=1, reward=0.9),
        shown(2, None, group=1, reward=None),
        shown(0, 1, group=5, reward=0.3),
        shown(3, 3, group=1, reward=0.5),
    ]
    read = Read(page(JOB, "", cards))
    assert [have.get("style") for have in read.all("article")] == ["--rank: 1", "--rank: 2", "--rank: 3", None, None]
    assert [word for word in read.words if " sample " in word] == [
        f"group {group} · sample {index} · policy 0 · seed 0"
        for group, index in ((5, 0), (1, 1), (1, 3), (1, 0), (1, 2))
    ]


def test_what_cannot_be_shown_is_told() -> None:
    words = Read(page(JOB, "", [shown(media=None), shown(1, media_type="image/tiff")])).words
    assert {"no longer kept", "image/tiff is not shown"} <= set(words)


def test_an_answer_is_shown_as_text() -> None:
    made = page(JOB, "", [shown(media=HOSTILE.encode(), media_type="text/plain")])
    read = Read(made)
    assert read.all("pre", **{"class": "answer"})
    assert HOSTILE in "".join(read.words)
    assert not read.all("script")
    assert not read.all("img")


def test_two_hundred_samples() -> None:
    text = page(JOB, "Worst", [shown(i, i + 1, bytes(2000), group=i // 12) for i in range(200)])
    assert len(Read(text).all("article")) == 200
    assert len(text) < 200 * (2000 * 4 / 3 + 2500)


@pytest.mark.parametrize(("value", "made"), [(None, "<p>a</p>"), (False, "<p>a</p>"), (True, "<p x>a</p>")])
def test_attributes_that_are_none_or_false_are_left_out(value: object, made: str) -> None:
    assert tag("p", "a", x=value) == made


def test_a_group_names_its_source() -> None:
    assert "step 3 · group 0 · signs · 1 shown" in " ".join(Read(page(JOB, "", [shown(source="signs")])).words)
    assert "step 3 · group 0 · 1 shown" in " ".join(Read(page(JOB, "", [shown()])).words)


def test_what_all_samples_share_is_said_once() -> None:
    same, other = {"ocr": "ocr 1.2"}, {"ocr": "ocr 1.3"}
    text = page(JOB, "", [shown(index, versions=same) for index in range(4)])
    assert text.count("ocr 1.2") == 1
    text = page(JOB, "", [shown(0, versions=same), shown(1, versions=other)])
    assert (text.count("ocr 1.2"), text.count("ocr 1.3")) == (1, 1)


def test_names_break_after_their_marks_alone() -> None:
    text = page(JOB, "", [shown(scores={"jpeg_compressibility": -2.0})])
    assert '<th scope="row">jpeg_<wbr>compressibility</th>' in text
    assert re.search(r"^th \{[^}]*overflow-wrap: break-word", text, re.MULTILINE)


def test_small_pictures_stay_sharp_and_videos_play() -> None:
    def png(width: int) -> bytes:
        return b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + width.to_bytes(4, "big") + b"\0\0\0@"

    pages = [page(JOB, "", [shown(media=png(width))]) for width in (64, 512)]
    assert [Read(text).all("img")[0].get("class") for text in pages] == ["pixels", None]
    (video,) = Read(page(JOB, "", [shown(media_type="video/mp4", media=b"film")])).all("video")
    assert {"autoplay", "muted", "loop", "playsinline"} <= video.keys()
    assert video["preload"] == "auto"
