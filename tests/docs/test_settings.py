"""The page of settings and the published schema are those of the code; every setting is described."""

from __future__ import annotations

from docs.generate import settings as page
from docs.generate.markdown import outdated
from flowfleet.job.reference import settings
from flowfleet.job.spec import JobSpec


def test_the_page_is_up_to_date() -> None:
    assert outdated(page.PAGE, page.parts()) == [], "run `make docs`"


def test_the_schema_is_up_to_date() -> None:
    assert page.SCHEMA.read_text(encoding="utf-8") == page.schema(), "run `make docs`"


def test_every_setting_has_a_description() -> None:
    assert [one.name for one in settings(JobSpec) if not one.description] == []
