"""Parquet and Arrow as JSON lines, written by pyarrow itself."""

from __future__ import annotations

import datetime
import io
from typing import Any

import pytest

from flowfleet.prompts.tables import table_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS: list[dict[str, Any]] = [
    {"prompt": "a cat", "n": 1, "tags": ["x", "y"], "metadata": {"k": "v"}, "at": datetime.date(2026, 1, 2)},
    {"prompt": "ünï", "n": None, "tags": [], "metadata": {"k": None}, "at": None},
]


def parquet(rows: list[dict[str, Any]]) -> io.BytesIO:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return io.BytesIO(out.getvalue())


def arrow(rows: list[dict[str, Any]]) -> io.BytesIO:
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return io.BytesIO(out.getvalue())


@pytest.mark.parametrize(("made", "form"), [(parquet, "parquet"), (arrow, "arrow")])
def test_every_row_once_and_in_order(made: Any, form: Any) -> None:
    rows = [*ROWS, *({**ROWS[0], "n": number} for number in range(3000))]
    found = list(table_rows(made(rows), form))
    assert [row["n"] for row in found] == [1, None, *range(3000)]
    assert found[0] == {**ROWS[0], "at": "2026-01-02"}
    assert found[1]["metadata"] == {"k": None}
    (first, *_) = table_rows(made(rows), form, ["n", "tags", "at"])
    assert first == {"prompt": "a cat", "metadata": {"k": "v"}}


@pytest.mark.parametrize(("made", "form"), [(parquet, "parquet"), (arrow, "arrow")])
def test_pictures_are_refused_unless_they_are_left_out(made: Any, form: Any) -> None:
    rows = [{"prompt": "a", "image": {"bytes": b"png", "path": "a.png"}}]
    with pytest.raises(ValueError, match=r"'image' holds bytes.* data\.ignore_columns"):
        list(table_rows(made(rows), form))
    assert list(table_rows(made(rows), form, ["image"])) == [{"prompt": "a"}]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_other_files_are_refused(form: Any) -> None:
    with pytest.raises(ValueError, match=f"no readable {form} file"):
        list(table_rows(io.BytesIO(b"prompt\na cat\n"), form))
