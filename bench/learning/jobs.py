"""The jobs of composition: what an algorithm brings from its recipe of signs, and what must be there first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.learning.runs import Run
from flowfleet.job.files import prepare_job
from flowfleet.job.spec import JobSpec
from recipes.tiny.pairs import painter_of

WINDOW: Final = 4
SMOOTH: Final = "composition_smooth"
SMOOTHED: Final = f"{SMOOTH}=recipes/composition/judges/reward_gradient.toml"
"""How the reward's smooth score starts, which stands for the judge of ReFL's and SRPO's recipes of signs."""
OF_SIGNS: Final = (
    *(f"rollout.{name}" for name in ("prompts_per_step", "group_size", "batch_size", "height", "width")),
    *("rollout.num_inference_steps", "trainer.micro_batch_size"),
    *("rewards.ocr.", "rewards.jpeg_compressibility.", "algorithm.teachers."),
)
"""Prefixes of settings that belong to the world of signs."""


def own_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What an algorithm's recipe of signs says for any world: key with dots → value."""
    parts = {name: recipe[name] for name in ("rollout", "algorithm", "trainer", "rewards") if name in recipe}
    settings = {name: value for name, value in _flat(parts) if not name.startswith(OF_SIGNS)}
    if settings.get("rollout.window.strategy") == "fixed":
        settings["rollout.window.size"] = WINDOW
    if "rewards.judge.weight" in settings:
        settings |= {
            f"rewards.{SMOOTH}.weight": settings.pop("rewards.judge.weight"),
            "rewards.composition.weight": 0.0,
        }
        if "rollout.window.low" in settings:
            settings |= {"rollout.window.low": WINDOW, "rollout.window.high": 2 * WINDOW}
    return settings


def as_changes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as `--set` takes them."""
    return tuple(f"{name}={_toml(value)}" for name, value in settings.items())


def lacking(run: Run) -> str:
    """Says which preferences or teachers are missing and which command makes them; empty where none are."""
    if run.is_done:
        return ""
    spec = prepare_job(Path(f"recipes/{run.recipe}.toml"), run.changes, same_machine=True)
    return _pairs(spec) if spec.method.data == "preferences" else _teachers(spec)


def _pairs(spec: JobSpec) -> str:
    """A data set with fewer pairs than the job reads would be read again, which is not equal samples."""
    path, needed = Path(str(spec.data.train)), spec.schedule.steps * spec.rollout.prompts_per_step
    command = (
        f"`python -m recipes.composition.base.preferences --world small --model {spec.model.path} --output "
        f"{path.parent} --pairs {needed}`"
    )
    held = len(path.read_text().splitlines()) if path.exists() else 0
    if held < needed:
        return f"the job needs {needed} pairs and {path} has {held}: first run {command}"
    painter = painter_of(path.parent)
    if painter != Path(spec.model.path).resolve():
        return f"{painter} painted the pairs in {path.parent}: remove the folder, then run {command}"
    return ""


def _teachers(spec: JobSpec) -> str:
    adapters = [Path(teacher.adapter) for teacher in spec.algorithm.teachers.values()]
    missing = [path for path in adapters if not (path.exists() and (path.parent / "summary.json").exists())]
    if not missing:
        return ""
    keys, seed = [path.parent.name.rsplit("-", 2)[0] for path in missing], missing[0].parent.name.rpartition("-")[2]
    done = [str(path.parent) for path in missing if (path.parent / "summary.json").exists()]
    first = f"their runs kept no model, so remove {' '.join(done)}, then" if done else "first"
    return (
        f"its teachers {' and '.join(map(str, missing))} are missing: {first} run, with your --model and --set, "
        f"`python -m bench.learning.composition train --algorithms {' '.join(keys)} --seeds {seed} --directory "
        f"{missing[0].parents[1]}`"
    )


def _toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())}}}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def _flat(part: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
