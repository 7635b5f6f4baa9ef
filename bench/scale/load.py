"""The sizes of a rehearsal, its durations and addresses."""

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PORT = 7000
"""Port of every simulated service: like pods, they differ by address."""
REWARD = "score"


@dataclass(frozen=True)
class Load:
    """Replicas are shared evenly by pools, and each pool has one job."""

    replicas: int = 1000
    jobs: int = 100
    seconds: float = 120.0
    """Measured, once every job has made a step."""
    generate_s: float = 20.0
    """A Generate call takes, ± a fifth."""
    train_s: float = 5.0
    publish_s: float = 0.5
    """Time that a replica takes to load weights."""
    prompts: int = 10
    group_size: int = 8
    processes: int = 2
    """Number of processes that simulate replicas."""
    net: int = 64
    """Second byte of the addresses: rehearsals side by side need their own."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def replica_address(self, index: int) -> str:
        return self._address(0, index)

    def trainer_address(self, pool: int) -> str:
        return self._address(1, pool)

    @property
    def reward_address(self) -> str:
        return self._address(2, 0)

    def pool_of(self, index: int) -> str:
        return f"pool-{index % self.jobs}"

    def duration_s(self, base_s: float, *what: object) -> float:
        """`base_s` ± a fifth, the same for the same thing, so that jobs fall out of step."""
        digest = hashlib.sha256(repr(what).encode()).digest()
        return base_s * (0.8 + 0.4 * digest[0] / 255)

    def job(self, pool: int, folder: Path) -> dict[str, Any]:
        """The job of a pool. Its model is only a name and its prompts are few: nothing is sampled."""
        return {
            "name": self.pool_of(pool),
            "seed": pool,
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "prompts.txt")},
            "rewards": {REWARD: {}},
            "rollout": {
                "pool": self.pool_of(pool),
                "prompts_per_step": self.prompts,
                "group_size": self.group_size,
                "batch_size": self.group_size,
            },
            "schedule": {"steps": 1_000_000, "save_every": 2},
        }

    def _address(self, kind: int, index: int) -> str:
        return f"127.{self.net + kind}.{index // 250}.{1 + index % 250}:{PORT}"


def write_inputs(folder: Path) -> None:
    """The files that every job names."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (folder / "prompts.txt").write_text("".join(f'A sign that says "{number}"\n' for number in range(1000)))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting."""
    for item in fields(Load):
        name = f"--{item.name.replace('_', '-')}"
        parser.add_argument(name, type=type(item.default), default=item.default, help=f"({item.default})")


def from_flags(options: argparse.Namespace) -> Load:
    """Reads the flags. Raises ValueError for a load that cannot be rehearsed."""
    load = Load(**{item.name: getattr(options, item.name) for item in fields(Load)})
    if not 1 <= load.jobs <= load.replicas or load.processes < 1:
        raise ValueError("give at least one job and process, and a replica per job")
    return load
