"""What the runbook names is what the code has."""

import re
from pathlib import Path

from flowfleet.job.drop_reasons import DropReason

ROOT = Path(__file__).parents[2]


def test_the_runbook_lists_each_reason_of_a_dropped_sample() -> None:
    _, _, behind = (ROOT / "docs" / "operations.md").read_text().partition("### FlowfleetSamplesDropped\n")
    section, _, _ = behind.partition("\n### ")
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [reason for cell in cells for reason in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted(DropReason)


def test_a_reason_with_a_name_is_that_of_the_reward() -> None:
    assert DropReason.NO_SCORE.of("ocr") == "no_score_ocr"
    assert DropReason.GATED.of("clip") == "gated_clip"
