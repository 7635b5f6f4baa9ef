"""Parquet files, and the Arrow files of a folder that `datasets` saved, as JSON lines. Needs pyarrow.

Rows are read batch by batch, so that only a file's own compression decides what is in memory.
"""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Literal

TableFormat = Literal["parquet", "arrow"]
BATCH_ROWS = 1024
MISSING = "reading .parquet and folders of `datasets` needs pyarrow: install flowfleet[data] where data are read"


def rows_as_json_lines(file: BinaryIO, form: TableFormat, max_bytes: int, ignored: Sequence[str] = ()) -> bytes:
    """Converts rows to JSON lines, one object per row. Raises ValueError for a file that is not of this form, for cells
    that are not text, and beyond `max_bytes`."""
    try:
        import pyarrow
    except ImportError:
        raise ValueError(MISSING) from None
    out = io.BytesIO()
    try:
        for row in _rows(file, form, frozenset(ignored)):
            out.write(json.dumps(row, ensure_ascii=False, default=_plain).encode())
            out.write(b"\n")
            if out.tell() > max_bytes:
                raise ValueError(f"its rows take more than {max_bytes} bytes: leave columns out by data.ignore_columns")
    except pyarrow.ArrowException as error:
        raise ValueError(f"it is no readable {form} file: {error}") from None
    return out.getvalue()


def saved_files(folder: str, state: bytes) -> list[str]:
    """Names of the Arrow files in a folder that `Dataset.save_to_disk` made, by its state.json. Raises ValueError."""
    try:
        names = [str(file["filename"]) for file in json.loads(state)["_data_files"]]
    except (KeyError, TypeError, RecursionError, ValueError):
        raise ValueError(f"{folder}/state.json: it does not name the data set's files: save it again") from None
    if any("/" in name for name in names):
        raise ValueError(f"{folder}/state.json: it names files elsewhere: save the data set again")
    return names


def _rows(file: BinaryIO, form: TableFormat, ignored: frozenset[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    if form == "arrow":
        batches = iter(pyarrow.ipc.open_stream(file))
        names = None
    else:
        table = pyarrow.parquet.ParquetFile(file)
        names = [name for name in table.schema_arrow.names if name not in ignored]
        batches = table.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
    for batch in batches:
        kept = [name for name in batch.schema.names if name not in ignored]
        _check_types(batch.select(kept).schema)
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield from batch.select(kept).slice(start, BATCH_ROWS).to_pylist(maps_as_pydicts="strict")


def _check_types(schema: Any) -> None:
    """Raises ValueError for a column of bytes, such as the pictures of an image data set."""
    for column in schema:
        if "binary" in str(column.type):
            raise ValueError(
                f"the column {column.name!r} holds bytes, and prompts are text: leave it out by data.ignore_columns, "
                "and name pictures by their paths in `images`"
            )


def _plain(value: Any) -> str:
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    raise ValueError(f"a cell holds {type(value).__name__}, which is no text")
