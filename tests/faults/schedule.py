"""Which fault strikes what, at which step and in which phase of it. Pure: a seed gives the same schedule each time.

Kinds come from decks: each deck holds every kind once and is shuffled, so that all kinds strike equally often. Targets
and phases are dealt in the same way, per kind and over all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")

PHASES = ("rollout", "score", "train", "publish", "checkpoint")
"""Phases of a step in which faults strike."""
PROCESSES = ("controller", "rollout", "trainer-rank", "trainer-agent", "reward", "redis")
LINKS = ("rollout-redis", "controller-redis", "trainer-redis", "controller-rollout", "controller-reward")
POISONS = ("nan", "error", "missing", "twice", "empty", "range")
"""What the reward service answers for a poisoned sample. All of them cost that sample and no other."""

TARGETS: dict[str, tuple[str, ...]] = {
    "kill": PROCESSES,
    "stop": PROCESSES,
    "hang": PROCESSES,
    "cut-network": tuple(f"{link}/{how}" for link in LINKS for how in ("silent", "reset")),
    "cut-aof": ("redis",),
    "flip-checkpoint": ("checkpoint",),
    "flip-blob": ("trajectory", "prompt_embeds"),
    "full-disk": ("checkpoints",),
    "full-redis": ("redis",),
    "skew-clock": tuple(f"{name}/{way}" for name in ("controller", "rollout", "reward") for way in ("ahead", "behind")),
    "slow-reward": ("slow", "hang", "unavailable", "rubbish"),
    "poison-reward": POISONS,
}
"""Kind → what it strikes. "stop" is SIGSTOP for a while, "hang" is SIGSTOP for good."""
KINDS = tuple(TARGETS)
HELD = frozenset({"stop", "cut-network", "full-disk", "full-redis", "skew-clock", "slow-reward"})
"""Kinds that last for some seconds; the others are over at once."""
OWN_PHASE = {"poison-reward": "score", "full-disk": "checkpoint"}
"""Kinds that can only strike in one phase."""
BLOB_PHASES = ("rollout", "score")
"""Phases in which a step's blobs are stored and not yet read by the trainer."""
SHORTEST_S, LONGEST_S = 1.0, 3.0
FIRST_STEP = 2
"""Steps before the first fault: by then the job has a rhythm."""


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    number: int
    kind: str
    target: str
    step: int
    """It strikes in this step or, if the job is ahead, in the one that runs."""
    phase: str
    seconds: float = 0.0
    """How long it lasts."""
    sample: str = ""
    """Sample whose reward is poisoned: step/group/index."""
    dice: float = 0.0
    """0 to 1: chooses between equal targets and places inside a file."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """What the schedule must know of the job."""

    groups: int
    group_size: int
    spacing: int = 4
    """Steps from one fault to the next."""

    def steps_for(self, num_faults: int) -> int:
        """Steps of a job that has room for so many faults, and three steps after the last one."""
        return FIRST_STEP + self.spacing * num_faults + 3


def make_schedule(num_faults: int, seed: int, shape: Shape, kinds: Sequence[str] = KINDS) -> tuple[Fault, ...]:
    """Draws the faults, ascending by step. Raises ValueError for a kind that does not exist."""
    for kind in kinds:
        if kind not in TARGETS:
            raise ValueError(f"there is no fault {kind!r}: take some of {', '.join(KINDS)}")
    rng = random.Random(seed)
    drawn_kinds, drawn_phases = _deck(rng, tuple(kinds)), _deck(rng, PHASES)
    drawn_targets = {kind: _deck(rng, TARGETS[kind]) for kind in kinds}
    return tuple(
        _fault(number, next(drawn_kinds), drawn_targets, drawn_phases, shape, rng) for number in range(num_faults)
    )


def _fault(
    number: int,
    kind: str,
    targets: dict[str, Iterator[str]],
    phases: Iterator[str],
    shape: Shape,
    rng: random.Random,
) -> Fault:
    step = FIRST_STEP + number * shape.spacing
    phase = OWN_PHASE.get(kind) or next(phases)
    group, index, dice, blob_phase = (
        rng.randrange(shape.groups),
        rng.randrange(shape.group_size),
        rng.random(),
        rng.choice(BLOB_PHASES),
    )
    return Fault(
        number=number,
        kind=kind,
        target=next(targets[kind]),
        step=step,
        phase=blob_phase if kind == "flip-blob" else phase,
        seconds=round(rng.uniform(SHORTEST_S, LONGEST_S), 2) if kind in HELD else 0.0,
        sample=f"{step}/{group}/{index}" if kind == "poison-reward" else "",
        dice=round(dice, 6),
    )


def poisons(schedule: Sequence[Fault]) -> dict[str, str]:
    """Sample → what the reward answers for it."""
    return {fault.sample: fault.target for fault in schedule if fault.kind == "poison-reward"}


def _deck(rng: random.Random, cards: tuple[T, ...]) -> Iterator[T]:
    """Shuffled decks without end: any two cards come equally often, give or take one."""
    while True:
        yield from rng.sample(cards, len(cards))
