"""The controller's settings: flags for what is plain, the environment for what is secret."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from flowfleet.filesystem import check_names
from flowfleet.part import in_words
from flowfleet.process.service import API_KEY, is_loopback, service_parser
from flowfleet.redis import sentinel as redis_sentinel
from services.controller.limits import Limits
from services.controller.platforms.kubernetes.template import load_template
from services.controller.platforms.local.directory import addresses
from services.controller.prompts.sources import Sources
from services.controller.prompts.uploads import Uploads
from services.controller.reading.places import Places, url_origin
from services.controller.retention.keep import REMOVED, Keep

LogLevel = Literal["debug", "info", "warning", "error"]
_FLAGS = {"limits": "limit"}
"""Setting → flag, where the names differ."""


class ControllerSettings(BaseModel):
    """Raises ValueError for a combination that cannot work, naming what to change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    redis_url: SecretStr
    """FLOWFLEET_REDIS_URL: holds a password, so it never comes by flag."""
    redis_acks: int = Field(default=0, ge=0, le=100)
    """Replicas that must acknowledge a write of the leader. No controller leads a Redis that lost such a write, until
    an operator accepts the loss. 0: a single Redis, which is led whatever it holds."""
    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65_535)
    """0: a free one, written to `port_file`."""
    port_file: Path | None = None
    """Gets "host:port" once the controller serves."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Serves /metrics there as well, without the API key. Unset: only with the REST API."""
    state_dir: Path = Path("state")
    """Folder of the jobs' logs, checkpoints and results."""
    data_roots: tuple[Path, ...] = ()
    """Folders below which jobs may name data, images and models. Empty: no path at all."""
    data_urls: tuple[str, ...] = ()
    """SCHEME://HOST[:PORT] (of an object store: SCHEME://BUCKET) from which jobs may read data and images."""
    data_networks: tuple[str, ...] = ()
    """Networks (CIDR) that are not public, in which hosts of `data_urls` may be."""
    rewards: dict[str, str] = {}
    """Name → host:port of each reward service."""
    rewards_file: Path | None = None
    """More of them, a line each as in ocr-v2 = "127.0.0.1:7012" (TOML); it is read again when it changes."""
    api_key: SecretStr | None = None
    """FLOWFLEET_API_KEY: required of clients when set; must be set beyond loopback."""
    keys_file: Path | None = None
    """More keys, a table each with holder, digest and right (api/keys.py); it is read again when it changes."""
    blobs: str = "redis"
    """FLOWFLEET_BLOBS: "redis", or the fsspec URL of the blob store."""
    keep: Keep = Keep()
    """Limits of the ended jobs that stay, and the use of Redis's memory above which jobs wait."""
    limits: Limits = Limits()
    """How much one job, and all jobs together, may ask for."""
    archive: str = ""
    """FLOWFLEET_ARCHIVE: fsspec URL to which ended jobs are copied before they are removed. Empty: no archive."""
    trace_url: str = ""
    """FLOWFLEET_TRACE_URL: where people look at traces, with {trace_id} in it. Empty: jobs have no links to traces."""
    trainer_python: str = sys.executable
    """Interpreter that starts trainers; it has torch, the controller's own need not."""
    trainer_devices: tuple[str, ...] = ()
    """Accelerators of the jobs' trainers, one a rank. Empty: none are assigned, torch takes what it sees."""
    trainers: int = Field(default=2, ge=1, le=1024)
    """Ranks of trainers that run at once where no accelerators are assigned."""
    slurm: Path | None = None
    """File of the Slurm allocation whose nodes trainers run on, written by `flowfleet up` inside one."""
    kubernetes: str = ""
    """The Helm release (instance label) whose rewards, pools and trainers are pods. Empty: this machine's processes."""
    namespace: str = ""
    """POD_NAMESPACE: where the release is."""
    trainer_template: Path | None = None
    """Template for `kubernetes`: the batch/v1 Job that trainers are made from, as YAML."""
    owner: str = ""
    """Controller's Deployment, for `kubernetes`. It owns the trainers' Jobs, which are deleted with it."""
    scaler_port: int | None = Field(default=None, ge=0, le=65_535)
    """Address of the external scaler for KEDA. Unset: no scaler is served."""
    header_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """A client must send the whole header of a request within this time, or its connection is closed."""
    max_connections: int = Field(default=1000, ge=2, le=100_000)
    """Open connections to REST. Beyond it the one that has waited longest for a request gives way."""
    max_streams: int = Field(default=256, ge=1, le=100_000)
    """Open event streams, each of which holds a connection for as long as its job runs."""
    log_level: LogLevel = "info"

    @field_validator("redis_url")
    @classmethod
    def _redis_is_named(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(("redis://", "rediss://", "unix://", *redis_sentinel.SCHEMES)):
            raise ValueError("set FLOWFLEET_REDIS_URL, e.g. redis://:password@127.0.0.1:6379/0")
        return url

    @field_validator("api_key")
    @classmethod
    def _key_can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value() if key else "0" * 16
        if len(text) < 16 or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("FLOWFLEET_API_KEY needs at least 16 printable ASCII characters and no space")
        return key

    @field_validator("rewards")
    @classmethod
    def _addresses(cls, rewards: dict[str, str]) -> dict[str, str]:
        return addresses(rewards, "--reward")

    @field_validator("data_roots")
    @classmethod
    def _roots(cls, roots: tuple[Path, ...]) -> tuple[Path, ...]:
        for root in roots:
            if not root.is_absolute():
                raise ValueError(f"--data-root {root}: give an absolute path")
            if root.resolve() == Path("/"):
                raise ValueError(f"--data-root {root} would let jobs read the whole machine: name the folders of data")
        return roots

    @field_validator("data_urls")
    @classmethod
    def _urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if url_origin(url) != url.rstrip("/"):
                raise ValueError(f"--data-url {url}: give scheme and host alone, as in {url_origin(url)}")
        return tuple(map(url_origin, urls))

    @field_validator("data_networks")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"--data-network {network}: {error}; give a network as in 10.1.0.0/16") from None
        return networks

    @field_validator("archive")
    @classmethod
    def _archive_can_be_shown(cls, url: str) -> str:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "FLOWFLEET_ARCHIVE: leave user and password out of the URL, jobs show it; give them by the store's own "
                "environment"
            )
        return url

    @field_validator("trace_url")
    @classmethod
    def _trace_is_named(cls, url: str) -> str:
        if url and not (url.startswith(("http://", "https://")) and "{trace_id}" in url):
            raise ValueError(
                "FLOWFLEET_TRACE_URL: give an http(s) URL with {trace_id} in it, as in "
                "https://jaeger.example.com/trace/{trace_id}"
            )
        return url

    @field_validator("trainer_devices")
    @classmethod
    def _devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if not all(devices) or len(set(devices)) < len(devices):
            raise ValueError(f"--trainer-devices {','.join(devices)}: give each once, as in 0,1")
        return devices

    @model_validator(mode="after")
    def _key_beyond_loopback(self) -> ControllerSettings:
        if not self.local and self.api_key is None and self.keys_file is None:
            raise ValueError(
                f"--host {self.host} can be reached from other machines: set {API_KEY} to a secret that clients must "
                "send, or bind --host 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _streams_leave_room(self) -> ControllerSettings:
        if self.max_streams >= self.max_connections:
            raise ValueError(f"--max-streams {self.max_streams} must be below --max-connections {self.max_connections}")
        return self

    @model_validator(mode="after")
    def _one_platform(self) -> ControllerSettings:
        of_cluster = {"--trainer-template": self.trainer_template, "--owner": self.owner}
        if not self.kubernetes:
            for flag, value in of_cluster.items():
                if value:
                    raise ValueError(f"{flag} is for trainers on Kubernetes: give --kubernetes RELEASE as well")
            return self
        for flag, value in {**of_cluster, "POD_NAMESPACE (environment)": self.namespace}.items():
            if not value:
                raise ValueError(f"--kubernetes {self.kubernetes} needs {flag} as well")
        for flag, here in (
            ("--reward", self.rewards),
            ("--rewards-file", self.rewards_file),
            ("--trainer-devices", self.trainer_devices),
            ("--slurm", self.slurm),
        ):
            if here:
                raise ValueError(
                    f"{flag} is for one machine: with --kubernetes remove it, the controller finds the release's pods"
                )
        if self.trainer_template is not None:
            load_template(self.trainer_template)  # read again for each trainer: this one is for the error
        return self

    @property
    def local(self) -> bool:
        """Bound to loopback only."""
        return is_loopback(self.host)

    @property
    def sources(self) -> Sources:
        """Opens the sources that read for jobs; the caller closes them."""
        return Sources(Places.of(self.data_roots, self.data_urls, self.state_dir), self.data_networks)

    @property
    def uploads(self) -> Uploads:
        """Prompt files that users sent."""
        return Uploads(self.state_dir, self.limits.upload_bytes, self.limits.uploads_bytes)

    @classmethod
    def from_command_line(cls, argv: Sequence[str], env: Mapping[str, str] = os.environ) -> ControllerSettings:
        """Raises ValueError, one line a problem. Exits as argparse does for an unknown flag."""
        check_names(argv)
        flags = vars(_parser().parse_args(argv))
        rewards = [item.partition("=") for item in flags.pop("reward")]
        names = [name for name, _, _ in rewards]
        if len(set(names)) < len(names):
            raise ValueError(
                f"--reward: give each name once, not twice: {', '.join({n for n in names if names.count(n) > 1})}"
            )
        try:
            return cls(
                redis_url=SecretStr(env.get("FLOWFLEET_REDIS_URL", "").strip()),
                api_key=SecretStr(env[API_KEY].strip()) if env.get(API_KEY) else None,
                blobs=env.get("FLOWFLEET_BLOBS") or "redis",
                archive=env.get("FLOWFLEET_ARCHIVE", ""),
                trace_url=env.get("FLOWFLEET_TRACE_URL", "").strip(),
                keep=_named("keep", flags.pop("keep"), Keep),
                limits=_named("limit", flags.pop("limit"), Limits),
                namespace=env.get("POD_NAMESPACE", ""),
                rewards={name: address for name, _, address in rewards},
                data_roots=tuple(flags.pop("data_root")),
                data_urls=tuple(flags.pop("data_url")),
                data_networks=tuple(flags.pop("data_network")),
                **{name: value for name, value in flags.items() if value is not None},
            )
        except ValidationError as error:
            raise ValueError("\n".join(_explain(item) for item in error.errors())) from None


def _named(flag: str, items: Sequence[str], made: type[BaseModel]) -> Any:
    """Gives each NAME=VALUE to pydantic, which makes a Keep or Limits of them. Raises ValueError."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if made is Keep and name in REMOVED:
            raise ValueError(f"--keep {name} was removed: an ended job stays whole until days, jobs or gib removes it")
        if name not in made.model_fields or not equals:
            raise ValueError(f"--{flag} {item}: give NAME=VALUE, with NAME one of {', '.join(made.model_fields)}")
        if name in found:
            raise ValueError(f"--{flag} {name} is given twice")
        found[name] = value
    return found


def _explain(item: Any) -> str:
    message = in_words(item)
    if item["type"] == "value_error":
        return message
    flag, *name = map(str, item["loc"])
    return " ".join([f"--{_FLAGS.get(flag, flag).replace('_', '-')}", *name]) + f": {message}"


def _parser() -> argparse.ArgumentParser:
    parser = service_parser("Runs jobs and serves the REST API.")
    parser.set_defaults(port=8470)
    parser.add_argument(
        "--redis-acks",
        type=int,
        metavar="N",
        help="replicas that acknowledge what Redis must not lose (0: no replicas)",
    )
    parser.add_argument("--state-dir", type=Path, help="directory of jobs: logs, checkpoints, results (state)")
    parser.add_argument(
        "--data-root", type=Path, action="append", default=[], metavar="DIR", help="a folder that jobs may read (none)"
    )
    parser.add_argument(
        "--data-url", action="append", default=[], metavar="SCHEME://HOST", help="where jobs may read data from (none)"
    )
    parser.add_argument(
        "--data-network", action="append", default=[], metavar="CIDR", help="where their hosts may be, if not public"
    )
    parser.add_argument("--reward", action="append", default=[], metavar="NAME=HOST:PORT", help="a reward service")
    parser.add_argument(
        "--rewards-file", type=Path, metavar="FILE", help='more of them, NAME = "HOST:PORT" a line; read as it changes'
    )
    parser.add_argument(
        "--keys-file", type=Path, metavar="FILE", help="more API keys and what each may do (TOML); read as it changes"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="limit of what stays of ended jobs, e.g. jobs=200 or days=30; docs/operations.md lists them",
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="most of what jobs may ask for, e.g. samples_per_step=65536; docs/operations.md lists them",
    )
    parser.add_argument("--trainer-python", help="interpreter that starts trainers (this one)")
    parser.add_argument(
        "--trainer-devices", type=_devices, metavar="0,1", help="accelerators of the jobs' trainers, one a rank (all)"
    )
    parser.add_argument("--trainers", type=int, metavar="N", help="ranks of trainers at once without accelerators (2)")
    parser.add_argument("--slurm", type=Path, metavar="FILE", help="trainers are steps of this Slurm allocation (off)")
    parser.add_argument(
        "--kubernetes", metavar="RELEASE", help="trainers, rewards and pools are pods of this Helm release (off)"
    )
    parser.add_argument("--trainer-template", type=Path, metavar="FILE", help="the Job that trainers are made of")
    parser.add_argument("--owner", metavar="NAME", help="the controller's Deployment, which owns the trainers' Jobs")
    parser.add_argument("--header-timeout-s", type=float, metavar="S", help="a request's header must come within (10)")
    parser.add_argument("--max-connections", type=int, metavar="N", help="open connections to REST (1000)")
    parser.add_argument("--max-streams", type=int, metavar="N", help="open event streams (256)")
    parser.add_argument("--scaler-port", type=int, metavar="PORT", help="answer KEDA's external scaler there (off)")
    return parser


def _devices(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
