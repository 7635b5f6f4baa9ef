"""Text of others stays text: no view lets a terminal obey prompts, judges or reasons."""

from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic_core import to_json
from rich.console import Console
from rich.text import Text

from flowfleet.api.answers import read
from flowfleet.api.jobs import Job, JobEvent
from flowfleet.api.samples import Sample
from flowfleet.cli import options, views
from flowfleet.cli.terminal import Terminal, escaped
from flowfleet.client.progress import follow
from flowfleet.job.spec import parse_job
from tests.flowfleet.idle_controller import job_settings

EVIL = "a\x1b[2J\x1b]0;title\x07\x1b]52;c;cm0=\x1b\\\x9b31m\x90q\x9c\r\x08\x7f[link=file:///]b[/link][/x]:bomb:"
TURNED = "".join(map(chr, (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))
"""All of Unicode's Bidi_Control."""
EVIL += TURNED
OBEYED = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{TURNED}]")
WHEN = datetime(2026, 11, 1, tzinfo=UTC)
JOB = {
    "id": "0" * 36,
    "name": EVIL,
    "status": "failed",
    "desired": "failed",
    "reason": EVIL,
    "created_at": WHEN.isoformat(),
    "progress": {"phase": EVIL, "samples_dropped": {EVIL: 1}},
    "results": {EVIL: EVIL},
    "warnings": [EVIL],
    "spec": {EVIL: EVIL},
}
SAMPLE = {"step": 0, "group": 0, "index": 0, "prompt": EVIL, "reward": 0.5, "scores": {EVIL: 0.5}, "drop_reason": EVIL}


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def console(request: pytest.FixtureRequest) -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=request.param, color_system=None, width=400)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("view", ["job", "jobs", "samples", "text", "follow"])
def test_no_view_shows_control_characters(console: Terminal, view: str) -> None:
    job = read(Job, JOB)
    if view == "job":
        views.show_job(job, console)
    elif view == "jobs":
        console.print(views.jobs_table([job]))
    elif view == "samples":
        console.print(views.samples_table([read(Sample, SAMPLE)], [Path(EVIL)]))
    elif view == "text":
        console.print(EVIL, Text(EVIL))
    else:
        data = {"status": "failed", "reason": EVIL}
        follow(job, [JobEvent(id="1-0", type="status", time=WHEN, data=data)], console)
    text = shown(console)
    if view == "follow":  # its own signs move the cursor
        text = re.sub(r"\x1b\[(\?25[lh]|\d[AGK]|2K)|\r", "", text)
    assert OBEYED.findall(text) == []
    assert "a[2J" in text
    assert "[/x]:bomb:" in text


def test_show_folds_defaults_and_has_one_total_after_a_change(tmp_path: Path) -> None:
    """What a job has now: the steps that were asked for last, and since when its rewards are others."""
    spec = parse_job({**job_settings(tmp_path), "schedule": {"steps": 90}}).model_dump(mode="json")
    rewards = {"active": {"number": 2, "rewards": {}, "changes": ["ocr: weight 1 → 2"], "from_step": 40}}
    job = read(Job, {**JOB, "spec": spec, "progress": {"step": 50, "steps": 120}, "rewards": rewards})
    console = Terminal(file=io.StringIO(), color_system=None, width=400)
    views.show_job(job, console)
    text = shown(console)
    assert "50/120" in text
    assert "steps: 120" in text
    assert "90" not in text
    assert "changed at step 40: ocr: weight 1 → 2" in text
    assert "group_size" not in text
    assert len(text.splitlines()) < 30


def test_a_list_says_since_when_the_reward_is_of_other_rewards() -> None:
    for step, words in ((40, "0.500 "), (41, "0.500 since step 40"), (99, "0.500 since step 70")):
        progress = {"step": step, "reward": 0.5, "rewards_changed": [40, 70]}
        console = Terminal(file=io.StringIO(), color_system=None, width=400)
        console.print(views.jobs_table([read(Job, {**JOB, "progress": progress})]))
        assert words in shown(console)
        assert ("since" in words) == ("since" in shown(console))


def test_json_has_them_in_its_escapes() -> None:
    line = escaped(to_json({"a": EVIL, EVIL: [EVIL]}, indent=2))
    assert OBEYED.findall(line) == []
    assert json.loads(line) == {"a": EVIL, EVIL: [EVIL]}


def test_commands_print_by_such_consoles_alone() -> None:
    assert isinstance(options.out, Terminal)
    assert isinstance(options.err, Terminal)
    folder = Path(options.__file__).parent
    plain = re.compile(r"(?<!\w)Console\((?!\)\.is_terminal|\):)")
    assert [path.name for path in folder.rglob("*.py") if plain.search(path.read_text())] == []
