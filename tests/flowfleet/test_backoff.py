"""Waiting as a server asks for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from flowfleet.backoff import MAX_RETRY_AFTER_S, retry_after_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("2", 2.0), ("0.4", 0.4), ("-3", 0.0), ("1e9", MAX_RETRY_AFTER_S), ("inf", MAX_RETRY_AFTER_S)],
)
def test_seconds(header: str, seconds: float) -> None:
    assert retry_after_s(header) == seconds


@pytest.mark.parametrize("in_s", [-3600, 10, 86_400])
def test_a_date(in_s: int) -> None:
    header = format_datetime(datetime.now(UTC) + timedelta(seconds=in_s), usegmt=True)
    assert retry_after_s(header) == pytest.approx(min(max(in_s, 0), MAX_RETRY_AFTER_S), abs=2)


@pytest.mark.parametrize("header", [None, "", "soon", "nan", "Mon, 99 Foo 2026"])
def test_no_wish(header: str | None) -> None:
    assert retry_after_s(header) is None
