"""What each recipe sets, with the files that it extends, is what it set before.

After a change on purpose: `python -m tests.recipes.test_settings` writes settings.json again.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest

from flowfleet.job.files import BASES, RECIPES, recipe_names
from flowfleet.job.spec import read_job_file

FILE = Path(__file__).with_name("settings.json")


@cache
def digests() -> dict[str, str]:
    """Recipe to the SHA-256 of its settings, of which defaults are no part."""
    found = {name: read_job_file(RECIPES / f"{name}.toml") for name in recipe_names()}
    return {name: hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest() for name, one in found.items()}


@pytest.mark.parametrize(("name", "digest"), sorted(json.loads(FILE.read_text()).items()))
def test_its_settings_are_as_before(name: str, digest: str) -> None:
    assert digests()[name] == digest


def test_all_recipes_are_known_and_bases_are_none_of_them() -> None:
    assert set(digests()) == set(json.loads(FILE.read_text()))
    assert not [name for name in recipe_names() if name.startswith(f"{BASES}/")]


def test_every_base_is_extended() -> None:
    texts = [path.read_text() for path in RECIPES.rglob("*.toml")]
    for base in (RECIPES / BASES).glob("*.toml"):
        assert [text for text in texts if f'{base.name}"' in text], base


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
