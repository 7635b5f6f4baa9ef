"""Data sets of the Hub, read by the confined reader from a stand-in of its HTTP API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet.prompts.columns import Columns
from services.controller.prompts.sources import Sources, Unread
from services.controller.reading.places import NotAllowed, Places
from tests.flowfleet.prompts.hub_site import hub_site

pytest.importorskip("huggingface_hub")


def write(root: Path) -> None:
    for name, text in {
        "org/lines/train-00000-of-00002.jsonl": '{"prompt": "a"}',
        "org/lines/train-00001-of-00002.jsonl": '{"prompt": "b"}',
        "org/lines/test.jsonl": '{"prompt": "c"}',
        "org/lines/README.md": "a card",
        "org/two/one/train.csv": "prompt\na\n",
        "org/two/other/train.csv": "prompt\nb\n",
        "org/single/captions.csv": "prompt\nd\n",
        "org/none/README.md": "a card",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    write(tmp_path / "hub")
    with hub_site(tmp_path / "hub") as endpoint:
        monkeypatch.setenv("FLOWFLEET_READER_HF_ENDPOINT", endpoint)
        opened = Sources(Places.of([], ["hf://datasets/org"], tmp_path / "state"), ["127.0.0.0/8"])
        yield opened
        opened.close()


def test_splits_and_files_are_read(sources: Sources) -> None:
    def texts(place: str) -> list[str]:
        return [prompt.text for prompt in sources.prompts(f"hf://datasets/org/{place}")]

    assert texts("lines") == texts("lines/train") == ["a", "b"]
    assert texts("lines/test") == texts("lines/test.jsonl") == ["c"]
    assert texts("two/other") == texts("two@main/other/train.csv") == ["b"]
    assert texts("single") == ["d"]


def test_tables_of_the_hub_are_read(sources: Sources, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "hub/org/table/data"
    folder.mkdir(parents=True)
    rows = [{"text": f"prompt {number}", "image": {"bytes": b"png"}} for number in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    columns = Columns(prompt="text", ignored=frozenset({"image"}))
    assert [p.text for p in sources.prompts("hf://datasets/org/table", columns)] == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("two", "'train' is in several folders or formats (one/train.csv, other/train.csv): name one file"),
        ("lines/dev", "no file of the split 'dev'; its files are test.jsonl, train-00000"),
        ("none", "its files are none that can be read"),
        ("absent", "org/absent"),
        ("lines/absent.jsonl", "absent.jsonl"),
    ],
)
def test_what_the_hub_lacks_is_said_at_once(sources: Sources, place: str, words: str) -> None:
    with pytest.raises(ValueError) as failed:  # noqa: PT011
        sources.prompts(f"hf://datasets/org/{place}")
    assert words in str(failed.value)
    assert not isinstance(failed.value, Unread)


@pytest.mark.parametrize(
    "place",
    [
        "hf://datasets/other/name",
        "hf://models/org/name",
        "hf://datasets/org",
        "hf://datasets/org/../x",
        "hf://datasets/org/n@a:b",
    ],
)
def test_other_places_are_refused_unasked(sources: Sources, place: str) -> None:
    with pytest.raises(NotAllowed):
        sources.prompts(place)


def test_the_hub_must_be_where_the_operator_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub, or where it redirects to, in a private network stays out of reach."""
    write(tmp_path / "hub")
    with hub_site(tmp_path / "hub") as endpoint:
        monkeypatch.setenv("FLOWFLEET_READER_HF_ENDPOINT", endpoint)
        sources = Sources(Places.of([], ["hf://datasets"], tmp_path / "state"))
        with pytest.raises(Unread, match="--data-network"):
            sources.prompts("hf://datasets/org/lines")
        sources.close()
