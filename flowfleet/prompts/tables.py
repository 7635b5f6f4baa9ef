"""Rows of Parquet files, and of the Arrow files of a folder that `datasets` saved. Needs pyarrow.

A few bytes of a table can stand for very many: a value that a dictionary or a run repeats. So columns stay encoded, and
as many rows become Python objects at once as fit `SLICE_BYTES`, whatever each of them repeats.
"""

import datetime
import decimal
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any, BinaryIO, Literal

from flowfleet.extras import pip_install

TableFormat = Literal["parquet", "arrow"]
MAX_ROWS = 4_000_000
"""Rows of a data set."""
BATCH_ROWS = 1024
SLICE_BYTES = 32 * 2**20
"""Bytes of rows that are decoded at once, unless a row has more."""
BUFFER_BYTES = 2**20
MISSING = f"reading .parquet and folders of `datasets` needs pyarrow: {pip_install('data')} where data are read"
_SHOWN = 10
_REPEATING = ("dictionary", "run_end", "view")
"""Words in the names of types whose rows may share bytes."""


def table_rows(file: BinaryIO, form: TableFormat, ignored: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows as JSON has them, one at a time. Raises ValueError for a file that is not of this form, and for cells that
    are not text."""
    try:
        import pyarrow
    except ImportError:
        raise ValueError(MISSING) from None
    try:
        for batch in (_parquet if form == "parquet" else _arrow)(file, frozenset(ignored)):
            for row in _decoded(batch):
                yield json.loads(json.dumps(row, default=_plain))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"it is no readable {form} file: {error}") from None


def saved_files(folder: str, read: Callable[[str], bytes | None]) -> list[str]:
    """Names of the Arrow files in a folder that `Dataset.save_to_disk` made. `read`: gives a file of the folder by its
    name, None where there is none. Raises ValueError."""
    if (splits := read("dataset_dict.json")) is not None:
        named = _named(splits, "splits", lambda split: str(split))
        told = ", ".join(f"{folder}/{split}" for split in named[:_SHOWN]) or f"as in {folder}/train"
        raise ValueError(f"{folder}: it holds several splits: name one, {told}")
    if (state := read("state.json")) is None:
        raise ValueError(f"{folder}: not a folder that `datasets` saved: name one file, or save the data set again")
    if not (names := _named(state, "_data_files", lambda file: str(file["filename"]))):
        raise ValueError(f"{folder}/state.json: it does not name the data set's files: save it again")
    if any("/" in name for name in names):
        raise ValueError(f"{folder}/state.json: it names files elsewhere: save the data set again")
    return names


def _named(note: bytes, key: str, name: Callable[[Any], str]) -> list[str]:
    """Names in a list of a JSON file; none where it has another shape."""
    try:
        return [name(item) for item in json.loads(note)[key]]
    except (KeyError, TypeError, RecursionError, ValueError):
        return []


def _parquet(file: BinaryIO, ignored: frozenset[str]) -> Iterator[Any]:
    from pyarrow import parquet

    about = parquet.read_metadata(file)
    _check_rows(about.num_rows)
    columns = [about.schema.column(number) for number in range(len(about.schema))]
    texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    table = parquet.ParquetFile(file, metadata=about, read_dictionary=texts, buffer_size=BUFFER_BYTES)
    names = [name for name in table.schema_arrow.names if name not in ignored]
    _check_types([field for field in table.schema_arrow if field.name in names])
    size_bytes = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
    rows = _rows_at_once(size_bytes // max(1, about.num_rows))
    return table.iter_batches(rows, columns=names, use_threads=False)  # type: ignore[no-any-return]


def _arrow(file: BinaryIO, ignored: frozenset[str]) -> Iterator[Any]:
    import pyarrow

    stream = pyarrow.ipc.open_stream(file)
    names = [name for name in stream.schema.names if name not in ignored]
    _check_types([field for field in stream.schema if field.name in names])
    return (batch.select(names) for batch in stream)


def _decoded(batch: Any) -> Iterator[dict[str, Any]]:
    """Rows of a batch as Python objects."""
    _check_rows(batch.num_rows)
    repeats = any(word in str(field.type) for field in batch.schema for word in _REPEATING)
    rows = _rows_at_once(batch.nbytes // (1 if repeats else max(1, batch.num_rows)))
    for start in range(0, batch.num_rows, rows):
        yield from batch.slice(start, rows).to_pylist(maps_as_pydicts="strict")


def _rows_at_once(row_bytes: int) -> int:
    return max(1, min(BATCH_ROWS, SLICE_BYTES // max(1, row_bytes)))


def _check_rows(count: int) -> None:
    if count > MAX_ROWS:
        raise ValueError(f"it has {count} rows, and at most {MAX_ROWS} are read: leave some out")


def _check_types(fields: list[Any]) -> None:
    """Raises ValueError for a column of bytes, such as the pictures of an image data set."""
    for column in fields:
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
