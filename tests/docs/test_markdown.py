"""Generated parts of the docs: how they are put in, and that those of docs/algorithms.md are up to date."""

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from docs.generate import algorithms as tables
from docs.generate import metrics as metric_tables
from docs.generate import scorers as scorer_tables
from docs.generate.markdown import outdated, replaced, rewrite, table
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.job.spec import parse_job
from services.controller.limits import Limits
from services.controller.retention.keep import Keep

ROOT = Path(__file__).parents[2]
PAGE = ROOT / tables.PAGE

TEXT = (
    "# Page\n\n<!-- generated: one -->\nold\n<!-- end: one -->\n\nwords\n\n<!-- generated: two --><!-- end: two -->\n"
)


def test_the_tables_of_the_algorithms_page_are_up_to_date() -> None:
    assert outdated(PAGE, tables.parts()) == [], "run `make docs`"


def test_the_tables_of_what_services_export_are_up_to_date() -> None:
    assert outdated(ROOT / metric_tables.PAGE, metric_tables.parts()) == [], "run `make docs`"


@pytest.mark.parametrize("owner", [Limits, Keep])
def test_the_operations_page_has_each_limit_with_its_default(owner: type[BaseModel]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for name, field in owner.model_fields.items():
        assert f"\n| `{name}` | `{str(field.default).removesuffix('.0')}` |" in text


def test_the_tables_of_scorers_and_of_serve_are_up_to_date() -> None:
    assert outdated(ROOT / scorer_tables.PAGE, scorer_tables.parts()) == [], "run `make docs`"
    assert outdated(ROOT / scorer_tables.REWARDS, scorer_tables.reward_parts()) == [], "run `make docs`"
    assert (ROOT / scorer_tables.CHART).read_text(encoding="utf-8") == scorer_tables.chart(), "run `make docs`"


def test_make_docs_runs_every_generator() -> None:
    (listed,) = re.findall(r"^DOCS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run = set(listed.replace("\\", " ").split())
    generators = [
        path.relative_to(ROOT)
        for folder in ("flowfleet", "examples", "deploy")
        for path in (ROOT / folder).rglob("*.py")
        if "node_modules" not in path.parts and re.search(r"^ +rewrite\(", path.read_text(), re.MULTILINE)
    ]
    assert {str(path.with_suffix("")).replace("/", ".") for path in generators} <= run


def test_every_algorithm_is_in_its_table_and_every_loss_on_the_page() -> None:
    rows = tables.parts()["algorithms"]
    assert all(f"| `{name}` | [{algorithm.title}]" in rows for name, algorithm in ALGORITHMS.items())
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in LOSSES if f"`{name}`" not in page] == []


def test_the_pages_job_is_valid() -> None:
    [block] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    job = {"model": {"path": "m"}, "data": {"train": "p.txt"}, "rewards": {"ocr": {}}} | tomllib.loads(block)
    spec = parse_job(job)
    assert (spec.rollout.noise.type, spec.rollout.window.strategy, spec.rollout.window.size) == (
        "cps",
        "progressive",
        2,
    )


def test_a_part_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    assert outdated(page, {"one": "new", "two": "more"}) == ["one", "two"]
    rewrite(page, {"one": "new", "two": "more"})
    assert page.read_text() == (
        "# Page\n\n<!-- generated: one -->\n\nnew\n\n<!-- end: one -->\n\nwords\n\n"
        "<!-- generated: two -->\n\nmore\n\n<!-- end: two -->\n"
    )
    assert outdated(page, {"one": "new", "two": "more"}) == []
    assert outdated(page, {"one": "newer", "two": "more"}) == ["one"]


@pytest.mark.parametrize("text", ["", "<!-- generated: one -->", "<!-- end: one --><!-- generated: one -->"])
def test_a_page_without_the_place_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no part one"):
        replaced(text, "one", "new")
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    with pytest.raises(ValueError, match="no part three"):
        rewrite(page, {"one": "new", "three": "x"})
    assert page.read_text() == TEXT


def test_cells_cannot_break_a_table() -> None:
    assert table(["a", "b"], [["x | y", "two\nlines"]]) == "| a | b |\n| --- | --- |\n| x \\| y | two lines |"
