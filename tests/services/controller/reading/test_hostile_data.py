"""Data that take far more memory than they have bytes: the controller has none of it, a reader has a limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flowfleet.prompts.columns import Columns
from flowfleet.prompts.prompt import Prompt
from services.controller.prompts import sources as sources_module
from services.controller.prompts.sources import Sources
from services.controller.reading import reader
from services.controller.reading.places import Places

ROWS = 100_000
MiB = 2**20


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    opened = Sources(Places.of([tmp_path], [], tmp_path / "state"))
    yield opened
    opened.close()


def repeated(path: Path, value: str, rows: int) -> str:
    """A Parquet file that holds the value once."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    indices = pa.array([0]).take(pa.array([0] * rows)).cast(pa.int32())
    pq.write_table(pa.table({"prompt": pa.DictionaryArray.from_arrays(indices, pa.array([value]))}), path)
    return str(path)


def runs(folder: Path, rows: int) -> str:
    """A saved data set of one run."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir()
    column = pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array(["a"]))
    batch = pa.record_batch({"prompt": column})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return str(folder)


def own_memory() -> int:
    """Bytes of this process's own memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def test_prompts_take_none_of_the_controllers_memory(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n" * ROWS)
    sources.first_prompt(str(tmp_path / "a.txt"))
    before = own_memory()
    with closing(sources.prompts(str(tmp_path / "a.txt"))) as prompts:
        assert len(prompts) == ROWS
        assert own_memory() - before < 8 * MiB
        assert prompts[-1] == Prompt("a")
        assert prompts[-1].source == f"{tmp_path}/a.txt:{ROWS}"
        assert [prompt.source.rpartition(":")[2] for prompt in prompts.telling(3)] == ["1", "2", "3"]
    with pytest.raises(ValueError, match="closed"):
        prompts[0]
    assert not any((tmp_path / "state").iterdir())


def test_what_prompts_bring_comes_back(sources: Sources, tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "1.png", "rejected": "/2.png", "images": ["3.png"], "negative_prompt": "ü", "n": 1}
    (tmp_path / "a.jsonl").write_text("\n\n" + json.dumps(row))
    columns = Columns("preferences", origin="signs")
    with closing(sources.prompts(str(tmp_path / "a.jsonl"), columns)) as prompts:
        media, images = (f"{tmp_path}/1.png", "/2.png"), (f"{tmp_path}/3.png",)
        assert prompts[0] == Prompt("a", {"n": "1"}, images, media, "ü", "signs")
        assert prompts[0].source.endswith("a.jsonl:3")
        assert [*prompts.telling(0)] == [prompts[0]]
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n' * 3 + '{"prompt": "b", "negative_prompt": "c"}\n')
    with closing(sources.prompts(str(tmp_path / "b.jsonl"))) as prompts:
        assert [prompt.text for prompt in prompts.telling(2)] == ["a", "a", "b"]


def test_values_that_a_table_repeats_are_not_made_all_at_once(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 GiB of rows, in a reader of 700 MiB."""
    monkeypatch.setattr(reader, "MOST_MEMORY_BYTES", 700 * MiB)
    small = Sources(sources.places)
    with closing(small):
        place = repeated(tmp_path / "a.parquet", "x" * 4 * MiB, 1024)
        assert Path(place).stat().st_size < 512 * 1024
        with pytest.raises(ValueError, match=r"a\.parquet:1: the prompt has 4194304 bytes: give at most 32768"):
            small.prompts(place)
        monkeypatch.setattr(sources_module, "MAX_PROMPT_BYTES", 10 * MiB)
        with pytest.raises(ValueError, match=r"b\.parquet: a data set has at most \d+ rows and 10485760 bytes"):
            small.prompts(repeated(tmp_path / "b.parquet", "x" * 30_000, 4096))
        for place in (runs(tmp_path / "saved", 5_000_000), repeated(tmp_path / "c.parquet", "a", 5_000_000)):
            with pytest.raises(ValueError, match=r"it has 5000000 rows, and at most 4000000 are read"):
                small.prompts(place)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"[" + b"[]," * 3_000_000 + b"1]"),
        ("a.jsonl", b'{"prompt":"a","x":[' + b"[]," * 3_000_000 + b"1]}"),
        ("a.json", b'["' + "\U0001f600".encode() * 20_000_000 + b'"]'),
    ],
)
def test_a_reader_has_a_limit_and_is_killed_first(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.setattr(reader, "MOST_MEMORY_BYTES", 200 * MiB)
    (tmp_path / name).write_bytes(data)
    with closing(Sources(sources.places)) as small:
        with pytest.raises(ValueError, match=rf"{name}.* reading it takes more than {200 * MiB} bytes of memory"):
            small.prompts(str(tmp_path / name))
        (process,) = small.reader._idle
        folder = Path(f"/proc/{process._process.pid}")
        assert (folder / "oom_score_adj").read_text() == "1000\n"
        assert f"Max data size             {200 * MiB}" in (folder / "limits").read_text()


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{512 * MiB}\n")
    monkeypatch.setattr(reader, "_CGROUPS", (tmp_path / "none", tmp_path / "memory.max"))
    assert reader.memory_bytes() == 256 * MiB
    (tmp_path / "memory.max").write_text("max\n")
    assert reader.memory_bytes() == reader.MOST_MEMORY_BYTES
