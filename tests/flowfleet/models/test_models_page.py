"""Each of the two tables of docs/models.md, flows and what writes text, has one row for every family, and no other."""

import re
from pathlib import Path

import pytest

from flowfleet.models.registry import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


FLOWS, TEXTS = "| pipeline |", "| model class |"
"""What the two tables begin with."""


def rows(begins: str) -> list[tuple[str, str]]:
    """First and last cell of each row of a table."""
    table = PAGE.read_text(encoding="utf-8").partition(f"\n{begins}")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", table, flags=re.MULTILINE)


@pytest.mark.parametrize("begins", [FLOWS, TEXTS])
def test_every_family_has_its_row(begins: str) -> None:
    families = {
        name: family
        for name, family in FAMILIES.items()
        if family.adapter.startswith("flowfleet.models.") and family.trains(writes_tokens=begins == TEXTS)
    }
    assert sorted(name for name, _ in rows(begins)) == sorted(families)
    assert {name for name, condition in rows(begins) if condition != "–"} == {
        name for name, family in families.items() if (family.takes_media if begins == TEXTS else family.takes_images)
    }
