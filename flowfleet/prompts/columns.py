"""Rows of a data set become prompts here, whatever format they were read from.

Known columns are the prompt's own, `images`, `audio`, `video`, `negative_prompt` and `metadata`; preferences add
`chosen` and `rejected`. Every other column becomes metadata, and a name that is nearly a known one is rejected: no
column is dropped silently.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flowfleet.prompts.prompt import Kind, Prompt, beside, checked

_SIZE = re.compile(r"\s*([1-9]\d{0,4})\s*[x×]\s*([1-9]\d{0,4})\s*")
LISTS = ("images", "audio", "video")
"""Columns of paths."""
_OWN = (*LISTS, "negative_prompt", "metadata")
_MEDIA = ("chosen", "rejected")
_SHAPES: dict[Kind, str] = {
    "prompts": '{"prompt": "…", "metadata": {…}, "images": ["…"]}, metadata and images may be left out',
    "preferences": '{"prompt": "…", "chosen": "…", "rejected": "…"} of paths or URLs; metadata and images may be added',
}


@dataclass(frozen=True)
class Columns:
    """Which columns of a data set hold what."""

    kind: Kind = "prompts"
    prompt: str = "prompt"
    """Name of the column of prompts."""
    ignored: frozenset[str] = frozenset()
    """Names of columns that are left out on purpose."""
    origin: str = ""
    """Name of the job's source that the rows are of."""
    size: str = ""
    """Name of the column of sizes, if there is one."""

    @property
    def known(self) -> tuple[str, ...]:
        """Names with a meaning."""
        own = (*_OWN, self.size) if self.size else _OWN
        return (self.prompt, *own, *(_MEDIA if self.kind == "preferences" else ()))

    def expected(self) -> str:
        """The shape of a row, for messages."""
        return f"expected an object like {_SHAPES[self.kind]}".replace('"prompt":', f'"{self.prompt}":')


def read_row(row: Any, url: str, number: int, columns: Columns) -> Prompt:
    """The prompt of a row. Raises ValueError that names the row and says what to change."""
    where = f"{url}:{number}"
    try:
        if not isinstance(row, dict):
            raise ValueError(f"{columns.expected()}, not {kind_of(row)}")
        known, others = _plan(tuple(row), columns)
        return checked(_prompt(row, url, where, columns, known, others))
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def kind_of(value: Any) -> str:
    """Names the type of a JSON value."""
    kinds: list[tuple[type, str]] = [(bool, "true or false"), (int, "a number"), (float, "a number"), (str, "a text")]
    kinds += [(list, "a list"), (dict, "an object")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "nothing")


@lru_cache(64)
def _plan(names: tuple[str, ...], columns: Columns) -> tuple[frozenset[str], tuple[str, ...]]:
    """The known columns of rows with these names, and those that become metadata. Raises ValueError."""
    used = [name for name in names if name not in columns.ignored]
    for name in used:
        if near := _near(name, columns.known):
            raise ValueError(
                f"the column {name!r} is nearly {near!r}: rename it, or leave it out by data.ignore_columns"
            )
    if columns.prompt not in used:
        raise ValueError(
            f"there is no column {columns.prompt!r} but {', '.join(map(repr, used)) or 'none'}: name the column of "
            "prompts by data.prompt_column"
        )
    if columns.kind == "preferences" and not set(_MEDIA) <= set(used):
        raise ValueError(columns.expected())
    return frozenset(used) & set(columns.known), tuple(name for name in used if name not in columns.known)


def _prompt(
    row: Mapping[str, Any], url: str, where: str, columns: Columns, known: frozenset[str], others: tuple[str, ...]
) -> Prompt:
    text = _of_type(str, "a text", columns.prompt, row[columns.prompt])
    negative = row["negative_prompt"] if "negative_prompt" in known else None
    images = [path for name in LISTS if name in known for path in _paths(name, row[name])]
    pair = [_of_type(str, "a path", name, row[name]) for name in _MEDIA] if columns.kind == "preferences" else []
    if None in pair:
        raise ValueError(f"the column {_MEDIA[pair.index(None)]!r} is empty: give a path")
    return Prompt(
        text=text or "",
        metadata=_metadata(row, known, others),
        images=tuple([beside(url, path) for path in images]),
        media=tuple([beside(url, path) for path in pair]),
        negative=_of_type(str, "a text", "negative_prompt", negative),
        size=_size(columns.size, row[columns.size]) if columns.size in known else None,
        origin=columns.origin,
        source=where,
    )


def _size(name: str, value: Any) -> tuple[int, int] | None:
    """Width and height of a cell; None where it is empty."""
    if not value:
        return None
    found = _SIZE.fullmatch(str(value))
    if found is None:
        raise ValueError(f'the column {name!r} holds {value!r}: give width and height, as "768x512"')
    return int(found[1]), int(found[2])


def _of_type(kind: type, wanted: str, name: str, value: Any) -> Any:
    """The value of a column, or None where it is empty. Raises ValueError for a value of another type."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"the column {name!r} holds {kind_of(value)}: give {wanted}")
    return value


def _paths(name: str, value: Any) -> list[str]:
    """The paths of a column; a cell that is empty has none. One sound or film needs no list."""
    if isinstance(value, str) and name != "images":
        return [value]
    paths: list[Any] = _of_type(list, "a list of paths", name, value) or []
    for number, path in enumerate(paths, 1):
        if not isinstance(path, str):
            raise ValueError(f"item {number} of the column {name!r} holds {kind_of(path)}: give a path")
    return paths


def _metadata(row: Mapping[str, Any], known: frozenset[str], others: tuple[str, ...]) -> dict[str, str]:
    """The `metadata` column and all columns without a meaning. An empty cell adds nothing."""
    given = _of_type(dict, "an object", "metadata", row["metadata"] if "metadata" in known else None) or {}
    metadata = {key: _text(value) for key, value in given.items()}
    for name in others:
        if name in metadata:
            raise ValueError(f"{name!r} is a column and a key of its metadata: rename one of them")
        if row[name] is not None:
            metadata[name] = _text(row[name])
    return metadata


def _text(value: Any) -> str:
    """A value of the metadata, which are texts: objects and lists as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _near(name: str, known: tuple[str, ...]) -> str:
    """Returns the known name that a misspelled one means, or "". A numbered column is not a misspelling."""
    if name in known or name.rstrip("0123456789_-") in known:
        return ""
    plain = _plain(name)
    return next((ours for ours in known if _edits(plain, _plain(ours)) <= (2 if len(ours) > 9 else 1)), "")


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _edits(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbors between two names; more than 2 count as 3."""
    if abs(len(a) - len(b)) > 2:
        return 3
    rows = [list(range(len(b) + 1))]
    for i, left in enumerate(a, 1):
        row = [i]
        for j, right in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (left != right))
            if i > 1 and j > 1 and left == b[j - 2] and right == a[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return min(3, rows[-1][-1])
