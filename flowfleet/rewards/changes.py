"""Changes of a job's rewards while it runs: the request, and the rewards and shadows that result. Pure.

A shadow scores next to an active reward and has no effect. When it is promoted, it gives that reward its service and
its params, and the name stays, so that curves, weights and gates continue. `RewardChange` is the body of PATCH
/v1/jobs/{id}/rewards.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flowfleet.job.part import Part
from flowfleet.job.spec import JobSpec, RewardPart, parse_job

MAX_SHADOWS = 8
"""Maximum number of a job's shadows: each costs its service as much as a reward."""
MAX_PARAMS_BYTES = 64 * 1024
"""Maximum size of all params of a job's rewards and shadows together: each revision keeps them."""
NAME = r"[A-Za-z0-9._-]{1,64}"
"""Pattern of a shadow's name: it is part of keys."""


class ShadowPart(Part):
    """A reward that scores and changes nothing, and the active one that it is compared with."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    beside: str = Field(alias="for", min_length=1)
    """Name of the active reward."""
    service: str | None = Field(default=None, min_length=1)
    """Name of the reward service; unset: the shadow's own name."""
    params: dict[str, str] = Field(default_factory=dict)
    """Handed to the scorer with each request."""

    def as_reward(self) -> RewardPart:
        """Returns the reward that the shadow's service is called with; nothing trains on it."""
        return RewardPart(service=self.service, params=self.params, weight=0.0)


class RewardSet(BaseModel):
    """The rewards of a job from some step on."""

    model_config = ConfigDict(frozen=True)

    rewards: dict[str, RewardPart]
    shadows: dict[str, ShadowPart] = {}

    @property
    def params_bytes(self) -> int:
        """Size of all params, names and values."""
        params = [*(part.params for part in self.rewards.values()), *(part.params for part in self.shadows.values())]
        return sum(len(name.encode()) + len(value.encode()) for each in params for name, value in each.items())


class RewardChange(Part):
    """A requested change, applied in this order: remove, promote, set, shadow."""

    revision: int = Field(ge=0)
    """Number of the revision that this change builds on, as GET gave it."""
    remove: list[str] = Field(default_factory=list)
    """Active rewards or shadows."""
    promote: list[str] = Field(default_factory=list)
    """Shadows, each of which replaces the active reward that it is compared with."""
    set: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Active reward, old or new → its settings, as a JSON merge patch (RFC 7396): others stay, null unsets."""
    shadow: dict[str, ShadowPart] = Field(default_factory=dict)
    """Shadow, known or new → its settings."""
    open_steps: bool = False
    """The open steps of a paused job have the change too: their samples are scored again."""

    def describe(self) -> list[str]:
        """A line for each part, for the history. The same change has the same lines."""
        return [
            *(f"remove {name}" for name in self.remove),
            *(f"promote {name}" for name in self.promote),
            *(f"set {name} {_json(settings)}" for name, settings in self.set.items()),
            *(f"shadow {name} {_json(part.model_dump(exclude_defaults=True))}" for name, part in self.shadow.items()),
            *(["score open steps again"] if self.open_steps else ()),
        ]


def changed(spec: JobSpec, now: RewardSet, change: RewardChange) -> RewardSet:
    """The rewards of a job after a change. Raises ValueError, one line a problem, each beginning with its setting."""
    problems = [*_problems(spec, now, change)]
    if problems:
        raise ValueError("\n".join(problems))
    gone = {*change.remove, *change.promote}
    rewards = {name: part.model_dump(mode="json") for name, part in now.rewards.items() if name not in gone}
    shadows = {name: part for name, part in now.shadows.items() if name not in gone} | change.shadow
    for name in change.promote:
        shadow = now.shadows[name]
        rewards[shadow.beside] |= {"service": shadow.service or name, "params": shadow.params}
    for name, patch in change.set.items():
        rewards[name] = merged(rewards.get(name, {}), patch)
    problems = [*_shadow_problems(rewards, shadows)]
    if problems:
        raise ValueError("\n".join(problems))
    after = parse_job(spec.model_dump(mode="json") | {"rewards": rewards})
    if not any(part.has_influence for part in after.rewards.values()):
        raise ValueError("rewards: none is left that has a weight: a job needs one to learn from; keep one, or set one")
    new = RewardSet(rewards=after.rewards, shadows=shadows)
    if (size := new.params_bytes) > max(MAX_PARAMS_BYTES, now.params_bytes):
        raise ValueError(
            f"params: those of all rewards and shadows have {size} bytes, and at most {MAX_PARAMS_BYTES} are kept with "
            "each revision: shorten them, or put them into the settings of the service"
        )
    return new


def merged(target: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    """JSON merge patch (RFC 7396): keys of `patch` replace those of `target`, tables are merged, null removes."""
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value) if isinstance(value, dict) else value
    return result


def _problems(spec: JobSpec, now: RewardSet, change: RewardChange) -> Iterator[str]:
    if not spec.rewards:
        yield "rewards: this job scores nothing: its data say which sample is better"
    if not change.describe():
        yield "body: nothing to change: give set, shadow, promote or remove"
    for name in change.shadow:
        if not re.fullmatch(NAME, name):
            yield f"shadow.{name}: name it with up to 64 letters, digits, '.', '_' and '-'"
    names = Counter([*change.remove, *change.promote, *change.shadow, *change.set])
    yield from (
        f"{name}: named {count} times in one change: once is enough" for name, count in names.items() if count > 1
    )
    for name in change.remove:
        if name not in now.rewards and name not in now.shadows:
            yield f"remove.{name}: there is no such reward or shadow; there are: {_list(now.rewards, now.shadows)}"
    for name in change.promote:
        if name not in now.shadows:
            yield f"promote.{name}: there is no such shadow; there are: {_list(now.shadows)}"
    targets = Counter(now.shadows[name].beside for name in change.promote if name in now.shadows)
    for target, count in targets.items():
        if count > 1 or target in change.remove:
            yield f"promote: {target} can be replaced by one shadow, and not be removed as well"


def _shadow_problems(rewards: Mapping[str, Any], shadows: Mapping[str, ShadowPart]) -> Iterator[str]:
    for name, part in shadows.items():
        if name in rewards:
            yield f"shadow.{name}: this is the name of an active reward: give the shadow another, and `service`"
        if part.beside not in rewards:
            yield f"shadow.{name}.for: there is no active reward {part.beside!r}; there are: {_list(rewards)}"
    if len(shadows) > MAX_SHADOWS:
        yield f"shadow: a job has {MAX_SHADOWS} at most: remove some"


def _list(*tables: Mapping[str, Any]) -> str:
    return ", ".join(sorted(name for table in tables for name in table)) or "none"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
