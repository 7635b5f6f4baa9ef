"""`flowfleet rewards`: those of a running job, shown, compared and changed (docs/rewards.md)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowfleet.api.rewards import Distribution, RewardRevision, Rewards, ShadowComparison
from flowfleet.cli.options import Ca, JobId, Json, Url, out, tell
from flowfleet.cli.views import table
from flowfleet.client import Client
from flowfleet.client.progress import number
from flowfleet.job.setting_files import put
from flowfleet.local.stack import DEFAULT_STATE_DIR, StateDir
from flowfleet.text_files import JSON

WAIT_S = 600.0
RELOAD_S = 120.0
"""Time that a reward has to serve again."""


class ShowGroup(typer.core.TyperGroup):
    """Reads `flowfleet rewards ID` as `flowfleet rewards show ID`: without a command it takes the group's first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = not args or args[0].startswith("-") or args[0] in self.commands
        return super().parse_args(ctx, args if known else [next(iter(self.commands)), *args])


app = typer.Typer(cls=ShowGroup, no_args_is_help=True, help="Show, compare and change the rewards of a running job.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of an active reward.")]
Shadow = Annotated[str, typer.Argument(metavar="NAME", help="Name of a shadow.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return once the next step will use the change.")]


@app.command()
def show(job_id: JobId, url: Url = None, ca: Ca = None, json_: Json = False) -> None:
    """Show a job's rewards, how shadows compare with them, and what changed at which step."""
    with Client(url, ca=ca) as client:
        rewards = client.rewards(client.find(job_id).id)
    tell(rewards, json_, lambda: show_rewards(rewards, out))


@app.command("set")
def set_(
    job_id: JobId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an active or a new reward.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE…", help="As in the job file: weight=0.5 params.score=soft; null unsets."),
    ] = None,
    open_steps: Annotated[
        bool, typer.Option("--open-steps", help="Score the open steps of a paused job again, with this change.")
    ] = False,
    wait: Wait = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Change settings of a reward, or add one."""
    _change(job_id, url, ca, wait, json_, set={name: parse_settings(settings or ())}, open_steps=open_steps)


@app.command()
def shadow(
    job_id: JobId,
    name: Shadow,
    beside: Annotated[str, typer.Option("--for", help="Active reward that it is compared with.")],
    service: Annotated[str | None, typer.Option(help="Reward service to call; default: NAME.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the scorer; repeatable.")] = None,
    wait: Wait = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Add a shadow: a reward that scores next to an active one, without effect on training."""
    part: dict[str, Any] = {"for": beside, "params": dict(_pairs(param or ()))}
    _change(job_id, url, ca, wait, json_, shadow={name: part if service is None else part | {"service": service}})


@app.command()
def promote(
    job_id: JobId, name: Shadow, wait: Wait = False, url: Url = None, ca: Ca = None, json_: Json = False
) -> None:
    """Replace an active reward by its shadow; the reward's name, weight, curve and gate stay."""
    _change(job_id, url, ca, wait, json_, promote=[name])


@app.command()
def remove(
    job_id: JobId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a reward or a shadow.")],
    wait: Wait = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Ask a reward or a shadow no more."""
    _change(job_id, url, ca, wait, json_, remove=[name])


@app.command()
def reload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Reward of `flowfleet up`, as in --reward NAME=…")],
    state_dir: Annotated[Path, typer.Option(help="Directory of the stack.")] = DEFAULT_STATE_DIR,
    json_: Json = False,
) -> None:
    """Start a reward of this machine's stack again, and accept its file as it is now for the stack's jobs."""
    from flowfleet.local.session import reload_reward

    pid = reload_reward(StateDir(state_dir), name, RELOAD_S)
    said = f"reward-{name} serves again (pid {pid}); `rewards set ID {name} --open-steps` scores open steps again"
    tell({"pid": pid}, json_, lambda: out.print(said, highlight=False))


def _change(job_id: str, url: str | None, ca: Any, wait: bool, json_: bool, **change: Any) -> None:
    with Client(url, ca=ca) as client:
        job = client.find(job_id)
        rewards = client.change_rewards(job.id, **change)
        said = f"revision {rewards.revision}, from the next step that is not open yet"
        if wait:
            rewards = client.wait_for_rewards(job.id, rewards.revision, WAIT_S)
            said = f"revision {rewards.active.number}, from step {rewards.active.from_step} on"
    tell(rewards, json_, lambda: out.print(said, highlight=False))


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """key=value by dotted names, values as JSON where they are that, else text; params are text always."""
    settings: dict[str, Any] = {}
    for key, text in _pairs(words):
        is_param = key.startswith("params.") and text != "null"
        try:
            put(settings, key, text if is_param else _value(text))
        except ValueError as error:
            raise ValueError(f"{key}={text}: {error}") from None
    return settings


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"{word!r}: give KEY=VALUE, as in weight=0.5")
        yield key, text


def _value(text: str) -> Any:
    try:
        return JSON.decode(text)
    except json.JSONDecodeError:
        return text


# -- what is shown ---------------------------------------------------------------------------------------------------


def show_rewards(rewards: Rewards, console: Console) -> None:
    """Settings, comparisons, history."""
    console.print(_settings_table(rewards.active))
    for name, comparison in rewards.comparison.items():
        console.print()
        console.print(comparison_table(name, comparison))
    console.print()
    console.print(_history_table(rewards))


def _settings_table(active: RewardRevision) -> Table:
    made = table("REWARD", "SERVICE", "WEIGHT", "SETTINGS")
    for name, part in active.rewards.items():
        others = {key: value for key, value in part.items() if key not in ("service", "weight") and value}
        others = {key: value for key, value in others.items() if (key, value) != ("on_failure", "pause")}
        weight = number(part.get("weight", 1.0))
        made.add_row(name, part.get("service") or name, weight, Text(_plain(others)))
    for name, part in active.shadows.items():
        params = {"params": part["params"]} if part.get("params") else {}
        made.add_row(f"{name} (shadow)", part.get("service") or name, f"for {part['for']}", Text(_plain(params)))
    return made


def comparison_table(name: str, comparison: ShadowComparison) -> Table:
    """A shadow and its reward side by side, over training samples, and over held-out ones where there are some."""
    names = (comparison.beside, name)
    both = (comparison.train, *([comparison.held_out] if comparison.held_out.samples else ()))
    made = table("", *names, *(f"{each}, held out" for each in names if len(both) > 1))
    sides = [side for part in both for side in (part.active, part.shadow)]
    made.add_row("version", *(", ".join(side.versions) or "-" for side in sides))
    for label, attribute in _ROWS:
        made.add_row(label, *(_number(getattr(side, attribute)) for side in sides))
    made.add_row("5, 25, 50, 75, 95 %", *(_quantiles(side) for side in sides))
    for label, values in (
        ("samples of both", [str(part.samples) for part in both]),
        ("rank correlation", [_number(part.spearman) for part in both]),
        ("same order in groups", [_number(part.agreement) for part in both]),
    ):
        made.add_row(label, *(cell for value in values for cell in ("", value)))
    made.caption = f"{comparison.scored} samples scored, {comparison.failed} failed, {comparison.left_out} left out"
    made.caption_justify = "left"
    return made


_ROWS = (
    ("mean", "mean"),
    ("standard deviation", "std"),
    ("least", "min"),
    ("greatest", "max"),
    ("groups all equal", "zero_std_ratio"),
    ("latency p50, s", "latency_p50_s"),
    ("latency p99, s", "latency_p99_s"),
)


def _history_table(rewards: Rewards) -> Table:
    made = table("REVISION", "FROM STEP", "WHAT CHANGED")
    for revision in (*rewards.history, *([rewards.pending] if rewards.pending else ())):
        step = "pending" if revision.from_step is None else str(revision.from_step)
        made.add_row(str(revision.number), step, Text("\n".join(revision.changes) or "as submitted"))
    return made


def _quantiles(side: Distribution) -> str:
    values = (side.q05, side.q25, side.q50, side.q75, side.q95)
    return "-" if side.q50 is None else " ".join(_number(value) for value in values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _plain(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""
