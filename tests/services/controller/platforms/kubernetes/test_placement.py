"""Gangs of pods on a simulated cluster, through the real launcher and the real queue's waits: none holds a node for
longer than its limit, and all jobs finish."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.spec import parse_job
from services.controller.jobs.returned import Returned
from services.controller.platforms.kubernetes import launcher as kubernetes_launcher
from services.controller.platforms.kubernetes import pods
from services.controller.platforms.kubernetes.api import DEPLOYMENTS, EVENTS, JOBS, PODS, WORKLOADS
from services.controller.platforms.kubernetes.api import _problem as problem
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from services.controller.platforms.kubernetes.mirror import Mirror
from services.controller.platforms.kubernetes.placement import last_scale_up
from services.controller.waiting import NoPlace, NotYet, Queued

GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
LIMIT_S = 300
LOOK_S = 5
SHORTAGE = "0/1 nodes are available: 1 Insufficient gpu."
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TEMPLATE: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {
        "annotations": {
            "flowfleet.io/ranks-per-pod": "1",
            "flowfleet.io/accelerator": "example.com/gpu",
            "flowfleet.io/drain-s": "25",
            "flowfleet.io/placement-s": str(LIMIT_S),
        }
    },
    "spec": {
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", "subdomain": "f", "containers": [{"name": "trainer"}]}},
    },
}


JOB = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}, "trainer": {"world_size": 2}}
SPEC = parse_job(JOB)


@dataclass
class World:
    """API server, Job controller and scheduler of a cluster with `slots` places for pods. Time passes by `tick`."""

    slots: int
    random: random.Random
    now: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    workloads: list[Any] = field(default_factory=list)
    refuses_events: bool = False
    schedules: bool = True
    num_asked: int = 0
    """Times that events were listed."""

    def __post_init__(self) -> None:
        self.api, self.jobs, self.pods = self, Mirror(self, JOBS, ""), Mirror(self, PODS, "")  # type: ignore[arg-type]

    # -- as the launcher sees it ---------------------------------------------------------------------------------

    def pods_of(self, component: str, job_id: str) -> list[Any]:
        return [pod for pod in self.pods.objects.values() if pod["metadata"]["labels"]["flowfleet.io/job"] == job_id]

    async def list(self, resource: Any, selector: str, fields: str = "") -> tuple[list[Any], str]:
        if resource is EVENTS:
            self.num_asked += 1
            if self.refuses_events:
                raise problem(EVENTS, 403, b'{"message": "events is forbidden"}')
            return self.events, "1"
        if resource is WORKLOADS:
            return self.workloads, "1"
        return [
            job
            for job in self.jobs.objects.values()
            if selector.endswith(job["metadata"]["labels"]["flowfleet.io/job"])
        ], "1"

    async def get(self, resource: Any, name: str) -> Any:
        assert resource is DEPLOYMENTS
        return {"metadata": {"name": name, "uid": "owner"}}

    async def create(self, resource: Any, body: Mapping[str, Any]) -> Any:
        made: dict[str, Any] = json.loads(json.dumps(body))
        made["metadata"] |= {"uid": made["metadata"]["name"], "creationTimestamp": self.stamp()}
        made["status"] = {"startTime": self.stamp()}
        self.add_pods(made)
        self.jobs.objects[made["metadata"]["name"]] = made
        return made

    def add_pods(self, made: Mapping[str, Any]) -> None:
        for index in range(made["spec"]["completions"]):
            name = f"{made['metadata']['name']}-{index}"
            metadata = {
                "name": name,
                "labels": made["metadata"]["labels"],
                "ownerReferences": [{"uid": made["metadata"]["uid"]}],
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "creationTimestamp": self.stamp(),
            }
            self.pods.objects[name] = {"metadata": metadata, "spec": {}, "status": {"phase": "Pending"}}

    async def delete(self, resource: Any, name: str, *, grace_s: int | None = None) -> None:
        mirror = self.jobs if resource is JOBS else self.pods
        mirror.objects.pop(name, None)
        if resource is JOBS:
            self.pods.objects = {
                pod: seen
                for pod, seen in self.pods.objects.items()
                if seen["metadata"]["ownerReferences"][0]["uid"] != name
            }

    # -- what happens --------------------------------------------------------------------------------------------

    def stamp(self, at: float | None = None) -> str:
        return (BEGIN + timedelta(seconds=self.now if at is None else at)).isoformat().replace("+00:00", "Z")

    def age_s(self, timestamp: str) -> float:
        return self.now - (datetime.fromisoformat(timestamp) - BEGIN).total_seconds()

    def tick(self, seconds: float) -> None:
        """The scheduler places some pods, in a random order."""
        self.now += seconds
        if not self.schedules:
            return
        waiting = [pod for pod in self.pods.objects.values() if "nodeName" not in pod["spec"]]
        self.random.shuffle(waiting)
        for pod in waiting[: self.random.randint(0, len(waiting))]:
            if self.num_placed < self.slots:
                pod["spec"]["nodeName"] = "local"
                pod["status"].update(phase="Running", placed=self.now, conditions=[])
            else:
                why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                pod["status"]["conditions"] = [{**why, "message": SHORTAGE}]

    @property
    def num_placed(self) -> int:
        return sum("nodeName" in pod["spec"] for pod in self.pods.objects.values())

    def scale_up(self, pod: str, **times: Any) -> None:
        name = {"involvedObject": {"name": pod}, "metadata": {"creationTimestamp": self.stamp()}}
        self.events.append({**name, "lastTimestamp": self.stamp(), **times})


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a launcher for a world, on the world's clock. A trainer serves once all its pods run."""
    template = tmp_path / "trainer.yaml"
    template.write_text(json.dumps(TEMPLATE))

    def make(world: World) -> KubernetesLauncher:
        monkeypatch.setattr(pods, "age_s", world.age_s)
        made = KubernetesLauncher(world, "f", "n", template, "o")  # type: ignore[arg-type]

        async def serves(attempt: Any) -> bool:
            return made.placed(attempt["metadata"]["labels"]["flowfleet.io/job"])

        monkeypatch.setattr(made, "_serves", serves)
        return made

    monkeypatch.setattr(kubernetes_launcher, "STOP_MARGIN_S", 1.0)
    return make


@dataclass
class Run:
    """Jobs as a scheduler with a pool for each would drive them, until all have finished."""

    world: World
    launcher: KubernetesLauncher
    returned: Returned
    left: dict[str, int]
    """Job → seconds that it has yet to train."""
    serving: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    """Why jobs gave way."""
    longest_s: float = 0.0
    """Longest time that a Running pod waited for others of its gang."""

    async def step(self) -> None:
        for job_id in self.world.random.sample(sorted(self.left), len(self.left)):
            if job_id in self.serving:
                await self._train(job_id)
            elif not self.returned.waits(job_id, self.world.now):
                await self._look(job_id)
        self.world.tick(LOOK_S)
        self._measure()

    async def _look(self, job_id: str) -> None:
        try:
            await self.launcher.ensure(job_id, SPEC)
        except NotYet:
            return
        except NoPlace as error:
            self.returned.add(job_id, self.world.now)
            self.reasons.append(str(error))
            return
        self.returned.placed(job_id, self.world.now)
        self.serving.add(job_id)

    async def _train(self, job_id: str) -> None:
        self.left[job_id] -= LOOK_S
        if self.left[job_id] <= 0:
            await self.launcher.stop(job_id)
            self.returned.end(job_id)
            del self.left[job_id]

    def _measure(self) -> None:
        for job_id in self.left:
            own = self.world.pods_of("trainer", job_id)
            placed = [pod["status"]["placed"] for pod in own if "nodeName" in pod["spec"]]
            if 0 < len(placed) < len(own):
                self.longest_s = max(self.longest_s, self.world.now - min(placed))


@pytest.mark.parametrize(("num_jobs", "orders"), [(2, 100), (3, 40)])
async def test_jobs_that_cannot_all_be_placed_finish_in_every_order(launch: Any, num_jobs: int, orders: int) -> None:
    """Three jobs of two pods can hold three slots with none of them placed."""
    reasons = []
    for seed in range(orders):
        draw = random.Random(seed)
        world = World(3, draw)
        left = {f"job-{number}": draw.randint(1, 1500) for number in range(num_jobs)}
        run = Run(world, launch(world), Returned(draw), left)
        while run.left:
            await run.step()
            assert world.now < 40_000, (seed, run.left)
        assert run.longest_s <= LIMIT_S + 2 * LOOK_S, seed
        assert not world.jobs.objects
        reasons += run.reasons
    assert reasons, "some had to give way"
    assert {reason.partition(" (")[0] for reason in reasons} == {f"within {LIMIT_S} s: {SHORTAGE}"}


async def waits(world: World, launcher: KubernetesLauncher, seconds: float) -> NoPlace | None:
    """Asks for the trainer of a job that has no room until it is given up, or for so long."""
    end = world.now + seconds
    while world.now < end:
        try:
            await launcher.ensure("job-0", SPEC)
        except NotYet:
            world.tick(10.0)
        except NoPlace as error:
            return error
    return None


async def test_the_limit_counts_anew_from_the_last_scale_up_for_a_pod_of_the_job(launch: Any) -> None:
    world = World(1, random.Random(1))
    launcher = launch(world)
    assert await waits(world, launcher, 290) is None
    assert world.num_asked == 0
    own = min(world.pods.objects)
    world.scale_up("another-pod")
    world.scale_up(own, lastTimestamp=None, series={"lastObservedTime": world.stamp()})
    assert await waits(world, launcher, 290) is None
    world.scale_up(own, lastTimestamp=None, eventTime=world.stamp().replace("Z", ".123456Z"))
    assert await waits(world, launcher, 290) is None
    assert await waits(world, launcher, 40) is not None
    assert world.num_asked == 3, "asked when the time is up, and not at each look"
    assert not world.pods.objects


HELD: dict[str, Callable[[Any, Any], object]] = {
    "queue": lambda job, pod: job["metadata"]["labels"].update({"kueue.x-k8s.io/queue-name": "team-a"}),
    "suspended": lambda job, pod: job["spec"].update(suspend=True),
    "off": lambda job, pod: job["metadata"]["annotations"].update({"flowfleet.io/placement-s": "0"}),
    "gate": lambda job, pod: pod["status"].update(conditions=[GATED]),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
async def test_no_limit_holds_where_something_else_decides(launch: Any, held: Callable[[Any, Any], object]) -> None:
    world = World(0, random.Random(1))
    launcher = launch(world)
    await waits(world, launcher, 10)
    world.schedules = False
    [job] = world.jobs.objects.values()
    held(job, next(iter(world.pods.objects.values())))
    assert await waits(world, launcher, 1000) is None
    assert len(world.pods.objects) == 2


async def test_a_role_without_events_gives_up_after_the_limit(launch: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = World(1, random.Random(1), refuses_events=True)
    assert await waits(world, launch(world), 320) is not None
    assert "could not read scale-ups of the cluster: " in caplog.text


def test_scale_ups_of_other_pods_do_not_count() -> None:
    assert last_scale_up([], [{"metadata": {"name": "a"}}]) == ""


async def test_a_preempted_trainer_keeps_its_job_and_its_turn_in_kueues_queue(launch: Any) -> None:
    """Kueue suspends the Job, whose pods end, and admits it again: no second Job is made."""
    world = World(2, random.Random(1))
    launcher = launch(world)
    await waits(world, launcher, 10)
    [job] = world.jobs.objects.values()
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"
    assert await launcher.alive("job-0")
    job["spec"]["suspend"] = True
    before = dict(world.pods.objects)
    for pod in before.values():
        pod["metadata"]["deletionTimestamp"] = world.stamp()
    message = "couldn't assign flavors to pod set main: insufficient unused quota"
    world.workloads = [{"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]}}]
    assert not await launcher.alive("job-0")
    assert not launcher.placed("job-0")
    assert await launcher.termination_message("job-0") == ""
    with pytest.raises(Queued, match=f"trainer: waits in queue team-a: {message}"):
        await launcher.ensure("job-0", SPEC)
    job["spec"]["suspend"] = False
    world.add_pods(job)
    world.pods.objects |= {f"{name}-old": pod for name, pod in before.items()}
    assert await waits(world, launcher, 20) is None
    assert await launcher.alive("job-0")
    assert list(world.jobs.objects.values()) == [job]
