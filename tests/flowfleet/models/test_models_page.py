"""docs/models.md has one row for every registered family, and no other."""

import re
from pathlib import Path

from flowfleet.models.registry import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_every_family_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    families = {name: family for name, family in FAMILIES.items() if family.adapter.startswith("flowfleet.models.")}
    assert sorted(name for name, _ in rows) == sorted(families)
    assert {name for name, condition in rows if condition != "–"} == {
        name for name, family in families.items() if family.takes_images or family.takes_media
    }
