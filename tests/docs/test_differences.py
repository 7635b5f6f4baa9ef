"""The table of differences from the authors' code names what is known to differ."""

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def rows() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Differences from the authors\n")[2]
    return [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("GARDO's gate", "the other end"),
        ("DiffusionOPD", "without √(−dt)"),
        ("Flow-DPPO at step 0", "clamps σ to 0.99"),
        ("verl: dual clip, k3", "a ratio above 3 is cut where A < 0 (not for GSPO); k3 cut at ± 10"),
        ("CRD", "in a port only"),
        ("verl: std of a group", "divides by n − 1"),
    ],
)
def test_a_known_difference_is_in_the_table(subject: str, words: str) -> None:
    assert [row for row in rows() if subject in row.split("|")[1] and words in row]
