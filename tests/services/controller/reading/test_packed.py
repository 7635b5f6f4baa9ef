"""Digests of packed prompts follow what the prompts say, not where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from flowfleet.prompts.prompt import Prompt
from services.controller.reading import packed
from services.controller.reading.packed import Packer, Prompts

ROWS = [
    Prompt("a, 1,2]", {"k": "v"}),
    Prompt("b", images=("/i.png",)),
    Prompt("c", media=("/x.png", "/y.png")),
    Prompt("d"),
]


def digest(folder: Path, rows: Sequence[Prompt], *, file: str = "t.jsonl", lines: Sequence[int] = range(1, 9)) -> str:
    with closing(Prompts(folder, "")) as prompts:
        prompts.files.append(file)
        packer = Packer(prompts.descriptor, 0, 0, 1 << 20)
        for prompt, line in zip(rows, lines, strict=False):
            packer.add(prompt, 0, line)
        packer.flush()
        prompts.num_prompts, prompts.size_bytes = packer.count, packer.size_bytes
        return prompts.digest()


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_a_digest_follows_the_prompts_alone(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is written down here: raise the format when what it is of changes."""
    monkeypatch.setattr(packed, "_DIGESTED", at_once)
    before = digest(tmp_path, ROWS)
    assert before == "1:667fb01b68128f3d94d45aed680b57d877782f2d2dd47f6fd9d238bb1a5c1e12"
    assert digest(tmp_path, ROWS, file="moved.jsonl", lines=(2, 30, 400, 5000)) == before
    others = [
        ROWS[:3],
        ROWS[::-1],
        [Prompt("a, 1,2]", {"k": "w"}), *ROWS[1:]],
        [*ROWS[:3], Prompt("e")],
        [*ROWS[:3], Prompt("d", negative="")],
        [ROWS[0], Prompt("b", media=("/i.png",)), *ROWS[2:]],
    ]
    assert len({before, *(digest(tmp_path, rows) for rows in others)}) == len(others) + 1
