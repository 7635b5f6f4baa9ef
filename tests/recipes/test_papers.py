"""The recipes by the names of the papers hold what their table says was published, value by value."""

import re
from pathlib import Path

import pytest

from flowfleet.job.files import prepare_job
from flowfleet.job.setting_files import read_table
from tests.recipes.papers import FOLDER, SOURCES, read_recipes

ROOT = Path(__file__).parents[2]
RECIPES = read_recipes()
TABLE = read_table(FOLDER / SOURCES, "a table of sources")


def test_every_recipe_is_in_the_table() -> None:
    assert set(RECIPES) == set(TABLE["recipes"])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_recipe_has_the_values_of_the_table(name: str) -> None:
    table = {setting: entry["value"] for setting, entry in TABLE["recipes"][name]["settings"].items()}

    assert RECIPES[name] == table
    assert {setting: type(value) for setting, value in RECIPES[name].items()} == {
        setting: type(value) for setting, value in table.items()
    }


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_value_has_a_place_or_a_reason(name: str) -> None:
    for setting, entry in TABLE["recipes"][name]["settings"].items():
        if "ours" in entry:
            assert entry["ours"], setting
            assert set(entry) == {"value", "ours"}, setting
        else:
            assert entry["published"], setting
            assert entry["source"] in TABLE["sources"], setting
            assert set(entry) - {"note"} in (
                {"value", "published", "source", "line"},
                {"value", "published", "source", "text"},
            ), setting
            assert entry.get("line", 1) > 0, setting


def test_every_source_is_a_file_at_a_commit_that_a_recipe_cites() -> None:
    cited = {
        entry["source"]
        for recipe in TABLE["recipes"].values()
        for entry in recipe["settings"].values()
        if "source" in entry
    }
    assert cited == set(TABLE["sources"])
    for name, source in TABLE["sources"].items():
        assert set(source) - {"note"} == {"repository", "commit", "file"}, name
        assert re.fullmatch("[0-9a-f]{40}", source["commit"]), name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["repository"]), name


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_recipe_is_a_valid_job_of_its_own_name(name: str) -> None:
    spec = prepare_job(Path(f"papers/{name}"), same_machine=True)

    assert spec.name == name.replace("_", "-")
    assert TABLE["recipes"][name]["paper"] == spec.method.paper


def test_the_page_names_every_recipe() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert [name for name in RECIPES if f"`{name}`" not in text] == []
