"""The batch/v1 Job of a job's trainer, made from the chart's template. Pure.

The template says all that a cluster's people decide: image, volumes, security, placement, queue. Added here are name,
labels, owner, how many pods of how many ranks, their arguments, and an accelerator for each rank.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowfleet.job.spec import JobSpec
from flowfleet.job.training import KubernetesPart
from flowfleet.process.commands import POD_PORT, trainer_pod_command
from flowfleet.text_files import read_text

RANKS_PER_POD = "flowfleet.io/ranks-per-pod"
ACCELERATOR = "flowfleet.io/accelerator"
DRAIN_S = "flowfleet.io/drain-s"
PLACEMENT_S = "flowfleet.io/placement-s"
DEFAULT_PLACEMENT_S = 300
QUEUE = "kueue.x-k8s.io/queue-name"
JOB = "flowfleet.io/job"
CONTAINER = "trainer"
PRIORITY_CLASSES = "flowfleet.io/priority-classes"
QUEUES = "flowfleet.io/queues"
TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
MAX_NAME = 63
"""Maximum length of a pod's host name, which is <Job>-<index>."""


@dataclass(frozen=True)
class TrainerTemplate:
    """A checked template."""

    job: Mapping[str, Any]
    ranks_per_pod: int
    """At most."""
    accelerator: str
    """Resource of which each rank gets one; "" for CPUs."""
    drain_s: int
    """Time for a running command to end, and for an adapter to be saved, on SIGTERM."""
    subdomain: str

    def problem(self, spec: JobSpec) -> str | None:
        """Names the class or queue of a job that the operator does not allow; None where there is none."""
        annotations, asked = self.job["metadata"]["annotations"], spec.trainer.kubernetes
        for name, given, allowed, value in (
            ("priority_class", asked.priority_class, PRIORITY_CLASSES, "priorityClasses"),
            ("queue", asked.queue, QUEUES, "queues"),
        ):
            known = [one for one in annotations.get(allowed, "").split(",") if one]
            if given is not None and given not in known:
                return (
                    f"trainer.kubernetes.{name} = {given!r}: jobs may name {', '.join(known) or 'none'} here; the "
                    f"operator lists them in the chart's trainer.allowed.{value}"
                )
        return None

    def pods(self, ranks: int) -> int:
        """The fewest that share the ranks evenly, as torchrun wants it."""
        fewest = math.ceil(ranks / self.ranks_per_pod)
        return next(count for count in range(fewest, ranks + 1) if ranks % count == 0)

    def render(
        self,
        job_id: str,
        spec: JobSpec,
        *,
        name: str,
        labels: Mapping[str, str],
        owner: Any,
        env: Mapping[str, str] | None = None,
        secrets: Collection[str] = (),
    ) -> dict[str, Any]:
        """`labels` are set on Job and pods; `owner` is an ownerReference; `env` holds no secret. `secrets`: variables
        that the Secret of the Job's name has, in place of the template's.

        Raises ValueError for a class or queue that the operator does not allow.
        """
        if problem := self.problem(spec):
            raise ValueError(problem)
        ranks = spec.trainer.world_size
        pods = self.pods(ranks)
        job: dict[str, Any] = copy.deepcopy(dict(self.job))
        every = {**labels, JOB: job_id}
        metadata, body = job["metadata"], job["spec"]
        metadata["name"] = name
        metadata["labels"] = {**(metadata.get("labels") or {}), **every}
        metadata["ownerReferences"] = [owner]
        body["completions"] = body["parallelism"] = pods
        of_pods = body["template"].setdefault("metadata", {})
        of_pods["labels"] = {**(of_pods.get("labels") or {}), **every}
        _place(job, spec.trainer.kubernetes)
        container = _container(body["template"]["spec"])
        master = f"{name}-0.{self.subdomain}"
        container["args"] = trainer_pod_command(
            pods=pods, ranks_per_pod=ranks // pods, master=master, drain_s=self.drain_s
        )
        if self.accelerator:
            limits = container.setdefault("resources", {}).setdefault("limits", {})
            limits[self.accelerator] = str(ranks // pods)
        variables = {"OMP_NUM_THREADS": str(spec.trainer.threads)} if spec.trainer.threads else {}
        variables |= env or {}
        kept = [entry for entry in container.get("env") or [] if entry["name"] not in secrets]
        given: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in variables.items()]
        given += [{"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in secrets]
        if kept or given:
            container["env"] = kept + given
        return job

    def address(self, name: str, namespace: str) -> str:
        """Address of rank 0 of the Job with this name."""
        return f"{name}-0.{self.subdomain}.{namespace}.svc:{POD_PORT}"


def _place(job: dict[str, Any], asked: KubernetesPart) -> None:
    """Adds what a job asks for itself, in place of the template's."""
    body, pod = job["spec"], job["spec"]["template"]
    if asked.priority_class:
        pod["spec"]["priorityClassName"] = asked.priority_class
    if asked.queue:
        job["metadata"]["labels"][QUEUE] = asked.queue
        body["suspend"] = True
    topologies = {"required": asked.required_topology, "preferred": asked.preferred_topology}
    if any(topologies.values()):
        kept = pod["metadata"].get("annotations") or {}
        kept = {name: value for name, value in kept.items() if name not in map(TOPOLOGY.format, topologies)}
        added = {TOPOLOGY.format(kind): label for kind, label in topologies.items() if label}
        pod["metadata"]["annotations"] = {**kept, **added}


def choice_problem(spec: JobSpec, template: Path | None) -> str | None:
    """Returns `TrainerTemplate.problem`; None on one machine, where there is no template."""
    return load_template(template).problem(spec) if template else None


def load_template(path: Path) -> TrainerTemplate:
    """Raises ValueError that names what is wrong with it."""
    try:
        return parse_template(yaml.safe_load(read_text(path)))
    except OSError as error:
        raise ValueError(f"--trainer-template {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--trainer-template {path} is not YAML: {error}") from None
    except ValueError as error:
        raise ValueError(f"--trainer-template {path}: {error}") from None


def parse_template(job: Any) -> TrainerTemplate:
    """Raises ValueError that names the field or annotation."""
    if not isinstance(job, dict) or (job.get("apiVersion"), job.get("kind")) != ("batch/v1", "Job"):
        raise ValueError("it must be a Job of batch/v1")
    for place, value in {
        "spec.completionMode": "Indexed",
        "spec.backoffLimit": 0,
        "spec.template.spec.restartPolicy": "Never",
    }.items():
        if _at(job, place) != value:
            raise ValueError(f"{place} must be {value}")
    annotations = _at(job, "metadata.annotations") or {}
    ranks = _number(annotations, RANKS_PER_POD, 1)
    drain_s = _number(annotations, DRAIN_S, 0)
    _number({PLACEMENT_S: DEFAULT_PLACEMENT_S, **annotations}, PLACEMENT_S, 0)  # the launcher reads it from the Job
    accelerator = annotations.get(ACCELERATOR)
    if not isinstance(accelerator, str):
        raise ValueError(f'annotation {ACCELERATOR} must be the name of a resource, as nvidia.com/gpu, or "" for CPUs')
    subdomain = _at(job, "spec.template.spec.subdomain")
    if not isinstance(subdomain, str) or not subdomain:
        raise ValueError("spec.template.spec.subdomain must name the headless Service of the trainers")
    _container(_at(job, "spec.template.spec"))
    return TrainerTemplate(job, ranks, accelerator, drain_s, subdomain)


def attempt_name(release: str, job_id: str) -> str:
    """Name of a new Job, different each time, so that no caller uses the last attempt's address. It takes the random
    end of a UUIDv7, whose beginning is the time."""
    suffix = f"-trainer-{job_id[-12:]}-{secrets.token_hex(3)}"
    return release[: MAX_NAME - len(suffix) - len("-9999")].rstrip("-") + suffix


def _number(annotations: Mapping[str, Any], name: str, least: int) -> int:
    text = str(annotations.get(name, ""))
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ValueError(f"annotation {name} must be a number, at least {least}, not {text!r}")
    return int(text)


def _container(pod: Mapping[str, Any]) -> dict[str, Any]:
    containers = pod.get("containers") or []
    for container in containers if isinstance(containers, list) else []:
        if isinstance(container, dict) and container.get("name") == CONTAINER:
            return container
    raise ValueError(f"spec.template.spec.containers must have one named {CONTAINER}")


def _at(job: Any, place: str) -> Any:
    """None where there is nothing."""
    for name in place.split("."):
        job = job.get(name) if isinstance(job, dict) else None
    return job
