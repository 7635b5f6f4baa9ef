"""Files of prompts: each format by its suffix, and what is wrong with a file by its line."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowfleet.limits import MAX_IMAGES, MAX_METADATA_BYTES, MAX_PROMPT_BYTES
from flowfleet.prompts import formats
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import format_of
from flowfleet.prompts.prompt import Kind, Prompt, media_type
from flowfleet.prompts.stores import read_prompts


def load_prompts(path: str, kind: Kind = "prompts") -> list[Prompt]:
    return read_prompts(path, Columns(kind))


def parse_prompts(data: bytes, name: str, columns: Columns = Columns()) -> list[Prompt]:
    return list(formats.parse_prompts(io.BytesIO(data), name, columns, format_of(name, columns)))


ROWS = {
    "a.JSONL": '{"prompt": "a cat", "count": 2}\n{"prompt": "a dog", "negative_prompt": "blur", "count": null}\n',
    "a.ndjson": '{"prompt": "a cat", "count": 2}\n\n{"prompt": "a dog", "negative_prompt": "blur"}',
    "a.json": '[{"prompt": "a cat", "metadata": {"count": 2}}, {"prompt": "a dog", "negative_prompt": "blur"}]',
    "a.Csv": 'count,prompt,negative_prompt\r\n2,a cat,\r\n,"a dog","blur"\r\n',
}


@pytest.mark.parametrize("name", ROWS)
def test_the_same_rows_in_every_format(name: str) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):  # with the byte order mark that Windows writes
        found = parse_prompts(mark + ROWS[name].encode(), name)
        assert found == [Prompt("a cat", {"count": "2"}), Prompt("a dog", negative="blur")]


@pytest.mark.parametrize("name", ["a.tsv", "a.yaml", "a", "a.txt.gz", "https://h/a?x=.txt", "s3://b/a.parquet2"])
def test_other_suffixes_are_refused_and_the_known_ones_named(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"no format of prompts: give \.txt, \.jsonl, \.ndjson, \.csv, \.json, \.parquet"
    ):
        format_of(name, Columns())


def test_the_suffix_of_a_url_is_its_path_s() -> None:
    assert format_of("https://h/A.CSV?signed=1#x", Columns()) == "csv"


def test_cells_of_csv_hold_commas_breaks_and_json() -> None:
    text = 'prompt,images,metadata\n"two,\nlines",a.png,"{""k"": [1]}"\n\nb,"[""b.png"", ""c.png""]",\n'
    first, second = parse_prompts(text.encode(), "d/a.csv")
    assert first == Prompt("two,\nlines", {"k": "[1]"}, images=("d/a.png",))
    assert (second.images, second.metadata, second.source) == (("d/b.png", "d/c.png"), {}, "d/a.csv:5")


def test_a_list_of_texts_is_a_list_of_prompts() -> None:
    assert parse_prompts(b'["a", "b"]', "a.json") == [Prompt("a"), Prompt("b")]


def test_another_column_may_hold_the_prompts() -> None:
    data = b'{"caption": "a", "prompt": "left", "bytes": "x"}'
    columns = Columns(prompt="caption", ignored=frozenset({"bytes"}))
    assert parse_prompts(data, "a.jsonl", columns) == [Prompt("a", {"prompt": "left"})]


@pytest.mark.parametrize(
    ("column", "near"),
    [
        ("promt", "prompt"), ("Prompt", "prompt"), ("pormpt", "prompt"), ("prompts", "prompt"), ("image", "images"),
        ("negative_promt", "negative_prompt"), ("negative prompt", "negative_prompt"), ("meta_data", "metadata"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_slip_of_the_pen_is_no_metadata(column: str, near: str, form: str) -> None:
    text = f"prompt,{column}\na,b\n" if form == "csv" else json.dumps({"prompt": "a", column: "b"})
    words = f"the column {column!r} is nearly {near!r}: rename it, or leave it out by data.ignore_columns"
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_prompts(text.encode(), f"a.{form}")
    left_out = Columns(ignored=frozenset({column}))
    assert parse_prompts(text.encode(), f"a.{form}", left_out) == [Prompt("a")]


@pytest.mark.parametrize("column", ["prompt_2", "count", "tag", "id", "caption", "imagenet", "seed"])
def test_names_of_their_own_are_metadata(column: str) -> None:
    assert parse_prompts(f"prompt,{column}\na,b\n".encode(), "a.csv") == [Prompt("a", {column: "b"})]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,n\na,1\nb\n", "a.csv:3: it has 1 cells, the header has 2"),
        ("a.csv", "prompt;n\na;1\n", "a.csv:1: the header is one cell, 'prompt;n': separate cells by commas"),
        ("a.csv", "prompt,prompt\na,b\n", "a.csv:1: the header names 'prompt' twice"),
        ("a.csv", "prompt,n\n,1\n", "a.csv:2: the prompt is empty: write one, or remove the row"),
        ("a.csv", 'prompt\n"a\n', "a.csv:2: unexpected end of data"),
        ("a.csv", "prompt,metadata\na,{1}\n", "a.csv:2: its metadata are no JSON: '{1}'"),
        ("a.jsonl", '{"prompt": "a", "prompt": "b"}', "a.jsonl:1: 'prompt' is given twice"),
        ("a.jsonl", '{"prompt": ["a"]}', "a.jsonl:1: the column 'prompt' holds a list: give a text"),
        ("a.jsonl", '{"prompt": "a", "n": 1, "metadata": {"n": 2}}', "a.jsonl:1: 'n' is a column and a key of its"),
        ("a.json", '{"prompt": "a"}', "a.json: expected a list of objects"),
        ("a.json", '[{"prompt": "a"}, 3]', "a.json:2: expected an object like"),
    ],
)
def test_what_is_wrong_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_prompts(text.encode(), name)


def test_text_files_have_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('A sign that says "K7"\n\n  Ünïcode „Grüße“  \n', encoding="utf-8")
    assert load_prompts(str(path)) == [Prompt('A sign that says "K7"'), Prompt("Ünïcode „Grüße“")]


def test_jsonl_files_carry_metadata(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "two cats", "metadata": {"count": 2}}\n{"prompt": "a dog"}\n')
    assert load_prompts(str(path)) == [Prompt("two cats", {"count": "2"}), Prompt("a dog")]
    path.write_text('{"prompt": "a cat", "metadata": {"of": {"class": "cat", "more": [1, null]}}}\n')
    assert load_prompts(str(path)) == [Prompt("a cat", {"of": '{"class": "cat", "more": [1, null]}'})]


def test_media_lie_beside_the_file_unless_they_say_where(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "a", "chosen": "x/1.png", "rejected": "/data/2.JPG", "images": ["3.webp"]}\n\n'
        '{"prompt": "b", "chosen": "s3://bucket/1.mp4", "rejected": "2.mp4", "metadata": {"n": 1}}\n'
    )
    first, second = load_prompts(str(path), "preferences")
    assert first.media == (f"{tmp_path}/x/1.png", "/data/2.JPG")
    assert first.images == (f"{tmp_path}/3.webp",)
    assert second == Prompt("b", {"n": "1"}, media=("s3://bucket/1.mp4", f"{tmp_path}/2.mp4"))
    assert [prompt.source for prompt in (first, second)] == [f"{path}:1", f"{path}:3"]
    assert load_prompts(str(path))[0] == Prompt(  # as prompts, pairs are metadata
        "a", {"chosen": "x/1.png", "rejected": "/data/2.JPG"}, images=(f"{tmp_path}/3.webp",)
    )


def test_a_file_named_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("edits.jsonl").write_text('{"prompt": "a", "images": ["a.png"]}')
    assert load_prompts("edits.jsonl")[0].images == ("a.png",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "chosen": "1.png"}', 'bad.jsonl:1: expected an object like {"prompt": "…", "chosen"'),
        ('{"prompt": "a", "chosen": "1.png", "rejected": 2}', "bad.jsonl:1: the column 'rejected' holds a number"),
        ('{"prompt": "a", "chosen": "1.gif", "rejected": "2.png"}', "bad.jsonl:1: 1.gif: its suffix tells no media"),
        (
            '{"prompt": "a", "chosen": "1.png", "rejected": "2.png", "images": "3.png"}',
            "bad.jsonl:1: the column 'images' holds a",
        ),
        ('{"prompt": "a", "chosen": "1.png", "rejected": "2.png", "images": ["3"]}', "bad.jsonl:1: 3: its suffix"),
    ],
)
def test_bad_preferences_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_prompts(str(path), "preferences")


def test_preferences_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a")
    with pytest.raises(ValueError, match=r"preferences have columns, and text has none: give \.jsonl"):
        load_prompts(str(tmp_path / "p.txt"), "preferences")


def test_types_go_by_suffix() -> None:
    assert [media_type(f"a.{s}") for s in ("png", "jpg", "JPEG", "webp", "mp4")] == [
        "image/png", "image/jpeg", "image/jpeg", "image/webp", "video/mp4",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["prompts", "preferences"])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "\n \n", "holds no prompt"),
        (
            "broken.jsonl",
            '{"prompt": "a", "chosen": "1.png", "rejected": "2.png"}\n{nonsense',
            "broken.jsonl:2: expected an object",
        ),
        ("list.jsonl", "[1]", "list.jsonl:1: expected an object"),
        (
            "no_prompt.jsonl",
            '{"text": "a"}',
            "no_prompt.jsonl:1: there is no column 'prompt' but 'text': name the column of prompts",
        ),
        (
            "half.jsonl",
            '{"prompt": "a", "chosen": "1.png", "rejected": "2.png", "metadata": {"note": "\\ud800"}}',
            "half.jsonl:1: holds half of a surrogate pair",
        ),
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, "deep.jsonl:1: it is nested too deeply"),
        (
            "long.jsonl",
            json.dumps({"prompt": "é" * (MAX_PROMPT_BYTES // 2 + 1), "chosen": "1.png", "rejected": "2.png"}),
            f"long.jsonl:1: the prompt has {MAX_PROMPT_BYTES + 2} bytes: give at most {MAX_PROMPT_BYTES}",
        ),
        (
            "metadata.jsonl",
            json.dumps(
                {"prompt": "a", "chosen": "1.png", "rejected": "2.png", "metadata": {"k": "x" * MAX_METADATA_BYTES}}
            ),
            "metadata.jsonl:1: metadata has 20971",
        ),
        (
            "images.jsonl",
            json.dumps({"prompt": "a", "chosen": "1.png", "rejected": "2.png", "images": ["1.png"] * (MAX_IMAGES + 1)}),
            f"images.jsonl:1: {MAX_IMAGES + 1} images, sounds and films: give at most {MAX_IMAGES}",
        ),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, name: str, text: str, message: str, kind: Kind) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), kind)


def test_a_long_line_of_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a\n" + "x" * MAX_PROMPT_BYTES + "\n" + "x" * (MAX_PROMPT_BYTES + 1))
    with pytest.raises(ValueError, match=r"long\.txt:3: the prompt has 32769 bytes: give at most 32768"):
        load_prompts(str(path))


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_more_rows_than_are_read_are_refused(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_PROMPTS", 3)
    line = b"a" + end
    assert len(parse_prompts(3 * line, "x.txt")) == 3
    with pytest.raises(ValueError, match=r"x\.txt: a prompt file has at most 3 rows"):
        parse_prompts(4 * line, "x.txt")


def test_an_empty_text_holds_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_prompts(str(tmp_path / "empty.txt"))


def test_a_question_brings_pictures_sounds_and_films(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"prompt": "what?", "video": "f.mp4", "images": ["a.png"], "audio": ["b.wav", "/c.FLAC"], "answer": 4}'
    )
    (prompt,) = load_prompts(str(path))
    assert prompt.images == (f"{tmp_path}/a.png", f"{tmp_path}/b.wav", "/c.FLAC", f"{tmp_path}/f.mp4")
    assert prompt.metadata == {"answer": "4"}
    table = tmp_path / "questions.csv"
    table.write_text("prompt,audio\nwhat?,b.wav\nwhy?,\n")
    assert [one.images for one in load_prompts(str(table))] == [(f"{tmp_path}/b.wav",), ()]


# -- dialects --------------------------------------------------------------------------------------------------------

SIGN = Prompt('a sign that says "HELLO, YOU"', {"tag": "x"})


@pytest.mark.parametrize(
    "text",
    [
        'tag,prompt\r\nx,"a sign that says ""HELLO, YOU"""\r\n',
        '\ufefftag,prompt\rx,"a sign that says ""HELLO, YOU"""\r',
        '"tag","prompt"\n"x","a sign that says ""HELLO, YOU"""',
        'tag, prompt\nx, "a sign that says ""HELLO, YOU"""\n\n',
        '"tag",  "prompt"\n"x",  "a sign that says ""HELLO, YOU"""\n',
    ],
    ids=["Excel", "Excel for Macintosh", "LibreOffice", "by hand", "by hand, quoted"],
)
def test_every_dialect_of_csv_gives_the_same_rows(text: str) -> None:
    assert parse_prompts(text.encode(), "a.csv") == [SIGN]


def test_spaces_of_cells_stay_unless_the_header_has_them() -> None:
    assert parse_prompts(b"prompt,tag\n a cat,  x\n", "a.csv") == [Prompt(" a cat", {"tag": "  x"})]
    assert parse_prompts(b'prompt, tag\na cat,  x\na dog," y"\n', "a.csv") == [
        Prompt("a cat", {"tag": "x"}),
        Prompt("a dog", {"tag": " y"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tag,prompt\nx, "a sign"\n', "a.csv:2: a space precedes the quote"),
        ('tag,prompt\nx,\t"a sign"\n', "a.csv:2: a space precedes the quote"),
        ('tag,prompt\nx,"a sign" \n', "a.csv:2: "),
        ('tag,prompt\nx,"a \\"sign\\""\n', "a.csv:2: "),
        ("tag;prompt\nx;a\n", "separate cells by commas"),
        ("tag\tprompt\nx\ta\n", "separate cells by commas"),
        ("tag|prompt\nx|a\n", "separate cells by commas"),
        (",prompt\n0,a\n", "a.csv:1: cell 1 of the header is empty: name the column"),
        ("prompt,tag,\na,x,\n", "a.csv:1: cell 3 of the header is empty: name the column"),
        ("'tag','prompt'\n'x','a'\n", "the column \"'prompt'\" is nearly 'prompt'"),
        ("sep=,\ntag,prompt\nx,a\n", "a.csv:1: cell 2 of the header is empty"),
    ],
)
def test_other_dialects_of_csv_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_prompts(text.encode(), "a.csv")


LINES = {
    "a.txt": "{}",
    "a.jsonl": '{{"prompt": "{}"}}',
    "a.csv": "{}",
}
"""A row of each format of lines."""
INSIDE = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_lines_end_at_lf_crlf_and_cr_alone(name: str, end: str) -> None:
    inside = INSIDE if name != "a.jsonl" else "\x85\u2028\u2029"  # JSON has no control characters in texts
    texts = [f"a poem{character}in two verses" for character in inside]
    rows = [LINES[name].format(text) for text in texts]
    data = end.join([*(["prompt"] if name == "a.csv" else []), *rows, "{" if name == "a.jsonl" else "x" * 40_000])
    found = formats.parse_prompts(io.BytesIO(data.encode()), name, Columns(), format_of(name, Columns()))
    assert [next(found).text for _ in texts] == texts
    with pytest.raises(ValueError, match=rf"{name}:{len(rows) + (2 if name == 'a.csv' else 1)}: "):
        next(found)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_other_encodings_are_named(name: str, encoding: str) -> None:
    data = {"a.json": '["é"]', "a.jsonl": '{"prompt": "é"}'}.get(name, "prompt\né\n").encode(encoding)
    words = "is not UTF-8: save the file as UTF-8" if encoding == "latin-1" else "UTF-16 or no text: save it as UTF-8"
    with pytest.raises(ValueError, match=rf"{name}.* {words}"):
        parse_prompts(data, name)


# -- rows ------------------------------------------------------------------------------------------------------------


def written(form: str, rows: list[dict[str, Any]], folder: Path) -> str:
    """A file of the rows."""
    path = folder / f"a.{form}"
    if form == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, rows[0].keys())
            out.writeheader()
            out.writerows(rows)
    elif form == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("blank", [None, "", "  ", "\t", "\u3000", "\u2028", "\u200b", "\ufeff"], ids=repr)
@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "parquet"])
def test_a_prompt_without_content_is_refused_in_every_format(form: str, blank: str | None, tmp_path: Path) -> None:
    for row in ({"prompt": blank}, {"tag": "x", "prompt": blank}):
        place = written(form, [{**row, "prompt": "a"}, row], tmp_path)
        number = {"csv": 3, "json": 2, "jsonl": 2, "parquet": 2}[form]
        with pytest.raises(ValueError, match=rf"a\.{form}:{number}: the prompt is empty: write one, or remove the row"):
            load_prompts(place)


def test_a_line_of_spaces_is_no_row_and_one_of_invisible_characters_is_refused() -> None:
    assert parse_prompts("a\n \t\u3000\n\nb".encode(), "a.txt") == [Prompt("a"), Prompt("b")]
    with pytest.raises(ValueError, match=r"a\.txt:2: the prompt is empty"):
        parse_prompts("a\n\u200b\n".encode(), "a.txt")


KINDS: dict[str, Any] = {
    "true or false": True, "a number": 1.5, "a text": "x.png", "a list": ["x.png"], "an object": {"a": 1},
}  # fmt: skip
COLUMNS = {
    "prompt": ({"a text"}, "a text"),
    "negative_prompt": ({"a text"}, "a text"),
    "images": ({"a list"}, "a list of paths"),
    "audio": ({"a list", "a text"}, "a list of paths"),
    "video": ({"a list", "a text"}, "a list of paths"),
    "metadata": ({"an object"}, "an object"),
    "chosen": ({"a text"}, "a path"),
    "rejected": ({"a text"}, "a path"),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_column_of_a_wrong_type_is_named_with_it(column: str, kind: str) -> None:
    taken, wanted = COLUMNS[column]
    row = {"prompt": "a", "chosen": "1.png", "rejected": "2.png", column: KINDS[kind]}
    for value in (row, {**row, column: [0]} if column in ("images", "audio", "video") else row):
        data, words = json.dumps(value).encode(), f"a.jsonl:1: the column {column!r} holds {kind}: give {wanted}"
        if value is not row:
            words = f"a.jsonl:1: item 1 of the column {column!r} holds a number: give a path"
        elif kind in taken:
            parse_prompts(data, "a.jsonl", Columns("preferences"))
            continue
        with pytest.raises(ValueError, match=re.escape(words)):
            parse_prompts(data, "a.jsonl", Columns("preferences"))
