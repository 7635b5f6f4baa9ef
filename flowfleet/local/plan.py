"""Which processes a stack has and how each is started. Pure: options and ports in, command lines out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flowfleet import hub
from flowfleet.hardware.accelerators import show_only, visible_devices
from flowfleet.job.files import RECIPES
from flowfleet.local.placement import NOWHERE, Placement
from flowfleet.local.pools import DEFAULT, Pool, given_twice, parse_devices
from flowfleet.local.rewards import Reward, parse_reward
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.stack import DEFAULT_PORT, DEFAULT_STATE_DIR, MARK, StackError, StateDir
from flowfleet.process.pulse import HANG_S
from flowfleet.process.service import API_KEY, PATIENT_THREADS, usable_cpus
from flowfleet.redis.server import server_url

HOST = "127.0.0.1"
ASKS = "human"
"""Scorer that asks people for votes by the REST API."""
KEYS_FILE = "keys.toml"
"""In the stack's directory: digest of the key by which that scorer asks."""
REWARDS_FILE = "rewards.toml"
"""In the stack's directory: reward services that are added while it runs, NAME = "HOST:PORT" a line."""


class StackOptions(BaseModel):
    """Options of `flowfleet up`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = DEFAULT_STATE_DIR
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65_535)
    """Port of the REST API; 0 takes a free one."""
    data_roots: tuple[Path, ...] = ()
    """Folders that jobs may read, besides the working folder and the recipes."""
    data_urls: tuple[str, ...] = ()
    """SCHEME://HOST from which jobs may read data and images."""
    hub_models: tuple[str, ...] = ()
    """ORG or ORG/NAME of models of the Hub that jobs may name and services download; empty: those that
    FLOWFLEET_HUB_MODELS lists here."""
    data_networks: tuple[str, ...] = ()
    """Networks (CIDR) that are not public, in which those hosts may be."""
    pools: tuple[Pool, ...] = (Pool(),)
    """Rollout pools; none: only trainers sample."""
    rewards: tuple[str, ...] = ("ocr",)
    """Scorers to start, or services that run elsewhere; `flowfleet.local.rewards` parses them."""
    trainer_devices: tuple[str, ...] | None = None
    """Accelerators of the jobs' trainers, one a rank; unset: those that rollouts leave."""
    trainer_python: Path | None = None
    """Interpreter that starts trainers, with flowfleet and a training engine; unset: this one."""
    trainers: int = Field(default=2, ge=1, le=1024)
    """Ranks of trainers that run at once on a machine without accelerators."""
    keep: tuple[str, ...] = ()
    """NAME=VALUE limits of what stays of ended jobs, as the controller's `--keep`."""
    limits: tuple[str, ...] = ()
    """NAME=VALUE limits of what jobs may ask for, as the controller's `--limit`."""
    archive: str | None = None
    """fsspec URL to which ended jobs are copied; unset: FLOWFLEET_ARCHIVE."""
    start_timeout_s: float = Field(default=900.0, gt=0.0)
    """Longest wait until every process serves, with the preloaded model in memory."""
    key: bool = True
    """The REST API asks for a key: FLOWFLEET_API_KEY of the starter's environment, else a new one."""
    hang_s: float = Field(default=HANG_S, ge=1.0)
    """A process that hangs is killed and started again within this, in seconds; one that loads or compiles does not."""

    @field_validator("rewards")
    @classmethod
    def _known(cls, rewards: tuple[str, ...]) -> tuple[str, ...]:
        names = [parse_reward(reward).name for reward in rewards]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"reward {twice[0]!r} is given twice")
        return rewards

    @field_validator("hub_models")
    @classmethod
    def _names_of_hub(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return hub.parse_list(",".join(names))

    @field_validator("trainer_python")
    @classmethod
    def _runs(cls, python: Path | None) -> Path | None:
        if python is not None and not os.access(python, os.X_OK):
            raise ValueError(f"--trainer-python {python} is no program: give a Python that has flowfleet")
        return python

    @field_validator("trainer_devices")
    @classmethod
    def _devices(cls, devices: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if devices is None else parse_devices(",".join(devices))

    @field_validator("pools")
    @classmethod
    def _own_names(cls, pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
        if name := given_twice(pool.name for pool in pools):
            raise ValueError(f"pool {name} is given twice: give each --pool a name of its own")
        return pools


def usual_replicas(engine: str) -> int:
    """Rollouts of a stack whose options do not say how many: one, and two on a CPU, whose cores they share."""
    return 1 if visible_devices() or engine != "diffusers" else min(2, usable_cpus())


OPEN = "the REST API asks for no key (--no-key): every user of this machine reads and steers all jobs as you"


class Kind(Enum):
    """How a process is asked whether it serves."""

    REDIS = "redis"  # PING
    CONTROLLER = "controller"  # GET /readyz
    ROLLOUT = "rollout"  # grpc.health.v1
    REWARD = "reward"  # grpc.health.v1


@dataclass(frozen=True)
class ProcessPlan:
    """Plan of one process of the stack."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    address: str
    """host:port it will serve on."""
    metrics: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the inherited environment."""
    engine: str | None = None
    """Engine of a rollout."""
    devices: tuple[str, ...] = ()
    """Accelerators that it is confined to."""
    pool: str = ""
    """Pool of a rollout."""
    probe: str = ""
    """host:port of its health service where `address` wants TLS and a token."""
    forks: bool = True
    """May be forked from a process that has imported torch; vLLM starts processes and threads of its own."""


OfPool = Callable[[Pool, Iterator[int]], list[ProcessPlan]]


@dataclass(frozen=True)
class Plan:
    processes: tuple[ProcessPlan, ...]
    url: str
    redis_url: str
    placement: Placement = NOWHERE
    api_key: str = ""
    of_pool: OfPool | None = None
    """Plans a pool's rollouts, on two free ports each."""
    ca: str = ""
    """PEM file of the authority of an https `url`."""

    @property
    def warning(self) -> str | None:
        """Warning for the user; None where there is nothing to say."""
        return "\n".join(filter(None, (self.placement.warning, None if self.api_key else OPEN))) or None


def ports_needed(options: StackOptions) -> int:
    """Counts ports: Redis, the controller unless its port is fixed, and two (RPC, metrics) per rollout and reward."""
    return 2 + 2 * (sum(pool.replicas for pool in options.pools) + len(_own_rewards(options)))


def make_plan(
    options: StackOptions,
    ports: Sequence[int],
    redis_argv: Sequence[str],
    secrets: StackSecrets,
    placement: Placement = NOWHERE,
) -> Plan:
    """Lays out the stack. `ports` holds `ports_needed(options)` free ones, the first of them Redis's."""
    state = StateDir(options.state_dir)
    free = iter(ports)
    redis_port, controller_port = next(free), next(free)
    redis_url = server_url(redis_port, secrets.operator)
    given = secrets.environments(redis_port)
    shared = {MARK: str(state.path)} | ({hub.MODELS: ",".join(options.hub_models)} if options.hub_models else {})
    env = {kind: {**given[kind], **shared} for kind in given}
    redis = ProcessPlan("redis", Kind.REDIS, tuple(redis_argv), f"{HOST}:{redis_port}", env={MARK: str(state.path)})
    of_pool = partial(_rollouts, options, env["rollout"])
    rollouts = [rollout for pool in placement.pools or options.pools for rollout in of_pool(pool, free)]
    url = f"http://{HOST}:{options.port or controller_port}"
    of_rewards = env["reward"] | {"FLOWFLEET_URL": url}
    asking = of_rewards | ({API_KEY: secrets.asking} if secrets.api_key else {})
    rewards = [
        _reward(reward, options, free, asking if reward.scorer == ASKS else of_rewards)
        for reward in _own_rewards(options)
    ]
    addresses = {reward.name.removeprefix("reward-"): reward.address for reward in rewards}
    addresses |= {reward.name: reward.address for reward in map(parse_reward, options.rewards) if reward.address}
    controller = _controller(options, options.port or controller_port, addresses, placement.trainer, env["controller"])
    processes = (redis, *rollouts, *rewards, controller)
    return Plan(processes, f"http://{controller.address}", redis_url, placement, secrets.api_key, of_pool)


def data_roots(options: StackOptions) -> list[Path]:
    """Returns the folders that jobs of the stack may read: the working folder, the recipes, preloaded models, and the
    folders that the options add.

    Raises StackError in a working folder that holds the whole machine.
    """
    here = Path.cwd()
    if here == Path(here.anchor):
        raise StackError(f"jobs may read the working folder, which is {here}: start the stack in another folder")
    models = [pool.model for pool in options.pools if pool.model is not None and hub.name_of(pool.model) is None]
    folders = [_whole_model(Path(model).expanduser().resolve()) for model in models]
    return list(dict.fromkeys(path.expanduser().resolve() for path in (here, RECIPES, *folders, *options.data_roots)))


def _whole_model(folder: Path) -> Path:
    """A model's folder. A snapshot of the Hugging Face cache only links files of the repository's folder above it."""
    repository = folder.parents[1] if len(folder.parents) > 1 else folder
    is_snapshot = folder.parent.name == "snapshots" and (repository / "blobs").is_dir()
    return repository if is_snapshot else folder


def _controller(
    options: StackOptions,
    port: int,
    rewards: Mapping[str, str],
    trainer_devices: Sequence[str],
    env: Mapping[str, str],
) -> ProcessPlan:
    state = StateDir(options.state_dir)
    argv = [*_service("controller", port), "--state-dir", str(state.path)]
    argv += ["--rewards-file", str(state.path / REWARDS_FILE)]
    limits = list(options.limits)
    if not any(limit.startswith("ranks=") for limit in limits):  # of trainers: each takes hundreds of megabytes
        limits.append(f"ranks={max(16, 2 * usable_cpus())}")
    argv += _each("--data-root", data_roots(options)) + _each("--data-url", options.data_urls)
    argv += _each("--data-network", options.data_networks) + _each("--keep", options.keep)
    argv += _each("--limit", limits)
    argv += _each("--reward", (f"{name}={address}" for name, address in rewards.items()))
    argv += ["--trainers", str(options.trainers)]
    if options.trainer_python is not None:
        argv += ["--trainer-python", str(options.trainer_python.absolute())]
    if trainer_devices:
        argv += ["--trainer-devices", ",".join(trainer_devices)]
    if options.key:
        argv += ["--keys-file", str(state.path / KEYS_FILE)]
    if options.archive is not None:
        env = {**env, "FLOWFLEET_ARCHIVE": options.archive}
    address = f"{HOST}:{port}"
    return ProcessPlan("controller", Kind.CONTROLLER, tuple(argv), address, metrics=address, env=env)


def _rollouts(options: StackOptions, env: Mapping[str, str], pool: Pool, ports: Iterator[int]) -> list[ProcessPlan]:
    prefix = "rollout-" if pool.name == DEFAULT else f"rollout-{pool.name}-"
    return [_rollout(f"{prefix}{index}", index, options, env, pool, ports) for index in range(pool.replicas)]


def _rollout(
    name: str, index: int, options: StackOptions, env: Mapping[str, str], pool: Pool, ports: Iterator[int]
) -> ProcessPlan:
    port, metrics, each = next(ports), next(ports), pool.sequence_parallel_size
    argv = [*_service("rollout", port, metrics), "--replica-id", name, "--pool", pool.name, "--engine", pool.engine]
    argv += ["--hang-s", f"{found_out_s(options.hang_s):g}"]
    if pool.max_batch is not None:
        argv += ["--max-batch", str(pool.max_batch)]
    if pool.adapter_slots is not None:
        argv += ["--adapter-slots", str(pool.adapter_slots)]
    if each > 1:
        argv += ["--sequence-parallel-size", str(each)]
    if pool.model is not None:
        argv += ["--model", pool.model, "--dtype", pool.dtype]
    devices = tuple(dict.fromkeys((pool.devices or ())[index * each : (index + 1) * each]))
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // max(1, sum(one.replicas for one in options.pools))))}
    return ProcessPlan(
        name,
        Kind.ROLLOUT,
        tuple(argv),
        f"{HOST}:{port}",
        metrics=f"{HOST}:{metrics}",
        env={**PATIENT_THREADS, **env, **(show_only(devices) or threads)},
        engine=pool.engine,
        devices=devices,
        pool=pool.name,
        forks=not pool.engine.startswith("vllm"),
    )


def _reward(reward: Reward, options: StackOptions, ports: Iterator[int], env: Mapping[str, str]) -> ProcessPlan:
    port, metrics = next(ports), next(ports)
    argv = [*_service("reward", port, metrics), "--scorer", str(reward.scorer)]
    argv += ["--hang-s", f"{found_out_s(options.hang_s):g}"]
    if reward.settings_file is not None:
        argv += ["--settings", str(reward.settings_file)]
    argv += _each("--set", reward.settings)
    name, address, env = f"reward-{reward.name}", f"{HOST}:{port}", {**env, **show_only(reward.devices)}
    metrics_at = f"{HOST}:{metrics}"
    return ProcessPlan(name, Kind.REWARD, tuple(argv), address, metrics_at, env=env, devices=reward.devices)


def _each(flag: str, values: Iterable[object]) -> list[str]:
    return [word for value in values for word in (flag, str(value))]


def _service(name: str, port: int, metrics: int | None = None) -> list[str]:
    argv = [sys.executable, "-m", f"services.{name}", "--host", HOST, "--port", str(port)]
    return argv if metrics is None else [*argv, "--metrics-port", str(metrics)]


def found_out_s(hang_s: float) -> float:
    """Detection time: half of the allowed hang time. A service detects its own hang in this half; in the other half the
    supervisor detects that the service reports unhealthy or does not answer."""
    return hang_s / 2


def _own_rewards(options: StackOptions) -> list[Reward]:
    return [reward for reward in map(parse_reward, options.rewards) if reward.address is None]
