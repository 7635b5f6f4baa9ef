"""Faults of a cluster with a job running: pods deleted, Redis' pod moved, Redis restored from an older copy, KEDA down,
a trainer that hangs, one that cannot start, an upgrade that restarts every workload, and a rollback.

The job runs once without faults and once with them. Nothing is dropped or doubled, and the exported adapter has the
same SHA-256. The log that the test prints says how long the job stood still at each fault.

Needs what test_demo.py needs, and the images of TAG-next. `tests/cluster/keda` stops and starts KEDA.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from flowfleet.client import Client
from flowfleet.job.spec import read_job_file
from services.trainer.beats import OUTSIDE_S
from tests.cluster.conftest import Cluster, run
from tests.cluster.release import TAG, Log, Release, storage
from tests.faults.job import EXACT, MAX_BATCH, RECIPE, TINY, changed, weights_hash
from tests.faults.watch import Watch
from tests.pages import commands

HERE = Path(__file__).parent
OPERATIONS = HERE.parents[1] / "docs" / "operations.md"
RELEASE = "faults"
COMPONENT = "app.kubernetes.io/component"
STEPS = 94
HANG_S = 10.0
LONGEST_S = max(HANG_S, EXACT["timeouts.checkpoint_s"], OUTSIDE_S)
"""What a rank that hangs may take to be found out: it may wait for Redis or write a checkpoint when it is stopped."""
STOP_ITS_RANKS = (
    "import os, pathlib, signal\n"
    "for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):\n"
    "    pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(')')[2].split()[1])\n"
    "    if parent == 1 and pid != os.getpid(): os.kill(pid, signal.SIGSTOP)\n"
)
"""torchrun, the pod's first process, lives on."""
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
BROKEN = [
    {"name": "RANK_OF_POD", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
    {"name": "GLOO_SOCKET_IFNAME", "value": "eth$(RANK_OF_POD)"},
]
"""A trainer's environment with which rank 1 alone cannot start: pods have an eth0 and no eth1."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_job_survives_what_a_cluster_does(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(capsys)
    with storage(cluster) as volumes:
        release = Faults(cluster, RELEASE, log, [*volumes, *_settings()])
        try:
            release.helm("install")
            log(f"installed: {release.pods_told()}")
            with release.client() as client:
                undisturbed = release.ended(client, client.submit(_job()), tmp_path / "undisturbed")
                disturbed = release.disturbed(client, tmp_path / "disturbed")
            assert disturbed == undisturbed, "the weights are not those of the run without faults"
            log(f"the weights are those of the run without faults: {disturbed}")
        except BaseException:
            release.tell()
            raise


class Faults(Release):
    def disturbed(self, client: Client, folder: Path) -> str:
        """Hash of the weights of a job under all faults, one after the other."""
        job = client.submit(_job())
        watch = Watch(client.url, job.id, {"authorization": f"Bearer {self.api_key}"}, poll_s=0.1)
        try:
            assert watch.until(lambda sight: sight.step >= 3, 120), watch.now
            self.log(f"submitted {job.id}; it is at step {watch.now.step}")
            self.strike(watch, "a rollout pod is deleted", self.lose_a_rollout)
            self.strike(watch, "the controller's pod is killed", self.kill_the_controller)
            self.strike(watch, "Redis' pod is moved", self.move_redis)
            self.strike(watch, "Redis is restored from a copy", lambda: self.restore(watch, folder.parent))
            self.strike(watch, "KEDA is down, and a rollout pod is deleted meanwhile", self.stop_keda)
            self.strike(watch, "the ranks of the trainer hang", lambda: self.hang(watch))
            self.strike(watch, "helm upgrade restarts every workload; a trainer pod is deleted", self.upgrade)
            self.strike(watch, "helm upgrade breaks trainers; helm rollback", self.break_and_roll_back)
            assert not watch.now.ended, "the job has to outlive the faults: more STEPS"
            weights = self.ended(client, job, folder)
            aside = [event.data["reason"] for event in client.events(job.id) if event.type == "checkpoint_set_aside"]
            assert any("ahead of the ledger" in reason for reason in aside), aside
            return weights
        finally:
            watch.close()

    def strike(self, watch: Watch, name: str, fault: Callable[[], None]) -> None:
        """Injects a fault and waits until the job has finished the step after the one that it hit."""
        assert not watch.now.ended, f"{name}: the job is {watch.now.status}: {watch.now.reason}"
        began = time.monotonic()
        fault()
        step = watch.now.step
        assert watch.until(lambda sight: sight.step >= step + 2 or sight.ended, 180), f"{name}: {watch.now}"
        moments = [began, *(at for at, _ in watch.steps if at > began)]
        stood = max(after - before for before, after in pairwise(moments))
        self.log(f"{name}: the job stood still for {stood:.1f} s and is at step {watch.now.step}")

    # -- faults ------------------------------------------------------------------------------------------------

    def lose_a_rollout(self) -> None:
        self.replaced("rollout", self.delete_a_pod("rollout"))

    def kill_the_controller(self) -> None:
        """Without a chance to give its lease back."""
        self.replaced("controller", self.delete_a_pod("controller", "--grace-period=0", "--force"))

    def move_redis(self) -> None:
        """A StatefulSet gives its pod the same name."""
        before = self.pods("redis")[0]["metadata"]["uid"]
        self.delete_a_pod("redis")
        self.wait("Redis' next pod", lambda: bool(_ready(pods := self.pods("redis")) and _uid(pods) != before), 60)

    def restore(self, watch: Watch, folder: Path) -> None:
        """Loses the steps since the copy, a checkpoint among them. The commands are those of docs/operations.md."""
        self.follow("Backup", folder)
        copied = watch.now.step
        assert watch.until(lambda sight: sight.step > copied + TINY["schedule.save_every"] + 1, 60), watch.now
        began, lost = time.monotonic(), watch.now.step
        self.follow("Restore Redis", folder)
        self.log(f"the commands took {time.monotonic() - began:.1f} s")
        assert watch.until(lambda sight: sight.at > began and sight.step <= copied + 1, 60), watch.now
        self.log(f"back from step {lost} to {watch.now.step}")

    def follow(self, heading: str, folder: Path) -> None:
        """Runs the commands of a section of the operations page for this release, in a folder."""
        script = commands(OPERATIONS.read_text(), heading).replace(
            "--namespace fleet", f"--namespace {self.cluster.namespace}"
        )
        script = re.sub(r"\bflowfleet-(redis|controller)", rf"{self.name}-flowfleet-\1", script)
        command = ["bash", "-euxo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr

    def stop_keda(self) -> None:
        run(str(HERE / "keda"), "down")
        try:
            self.lose_a_rollout()
        finally:
            run(str(HERE / "keda"), "up")

    def hang(self, watch: Watch) -> None:
        """Not near a checkpoint, so that most times the limit is HANG_S."""
        before, every = self.names("trainer"), TINY["schedule.save_every"]
        assert watch.until(lambda sight: sight.step % every == 1 and sight.phase == "rollout", 60), watch.now
        for pod in sorted(before):
            self.cluster.kubectl("exec", pod, "--", "python", "-c", STOP_ITS_RANKS)
        stopped = time.monotonic()
        words = self.said("trainer hangs, replacing it", LONGEST_S + 30)
        given_up = time.monotonic()
        self.wait("two other trainer pods", lambda: len(self.names("trainer") - before) == 2, 90)
        self.log(
            f"{words}: {given_up - stopped:.1f} s after SIGSTOP; its successor's pods are there "
            f"{time.monotonic() - given_up:.1f} s later"
        )

    def helm(self, verb: str, *more: str) -> None:
        """Also waits until a controller of now leads: before, a trainer's Job starts lost pods again as they were."""
        before = self.names("controller")
        super().helm(verb, *more)
        self.wait("the end of the controllers of before", lambda: not before & self.all_names(), 60)
        self.said("became leader", 60)

    def upgrade(self) -> None:
        """Upgrades like an operator who wants the new trainer image at once: docs/operations.md, Upgrade."""
        pods, began = self.names("controller", "rollout", "redis", "reward"), time.monotonic()
        self.helm("upgrade", "--set", f"images.tag={TAG}-next,redis.podAnnotations.faults=upgrade")
        self.log(f"helm upgrade took {time.monotonic() - began:.1f} s")
        assert not pods & (self.names("controller", "rollout", "reward")), "every workload restarts"
        self.replaced("trainer", self.delete_a_pod("trainer", index=1))
        self.wait(
            "trainers and rollouts of the new images alone",
            lambda: self.tags("trainer", "rollout") == {f"{TAG}-next"},
            60,
        )

    def break_and_roll_back(self) -> None:
        self.helm(
            *("upgrade", "--set", f"images.tag={TAG}-next", "--set-json", f"trainer.env={json.dumps(BROKEN)}"),
            *("--set", "controller.podAnnotations.faults=broken"),
        )
        self.delete_a_pod("trainer")
        words = self.said("eth1", 90)
        self.log(f"a controller says: {words}")
        began = time.monotonic()
        self.cluster.helm("rollback", self.name, "1", "--wait", "--timeout", "4m")
        self.log(f"helm rollback took {time.monotonic() - began:.1f} s")

    # -- looking -----------------------------------------------------------------------------------------------

    def replaced(self, component: str, name: str) -> None:
        """Waits until a pod is on its way out and as many as before are ready."""
        count = len(self.pods(component)) or 1
        self.wait(
            f"another {component} than {name}",
            lambda: name not in self.names(component) and len(_ready(self.pods(component))) >= count,
            120,
        )

    def all_names(self) -> set[str]:
        """Names of all pods, those on their way out included: a controller leads until its end."""
        return {pod["metadata"]["name"] for pod in self.cluster.get("pods")}

    def tags(self, *components: str) -> set[str]:
        """Tags of the images of their pods."""
        images = [pod["spec"]["containers"][0]["image"] for name in components for pod in self.pods(name)]
        return {str(image).rpartition(":")[2] for image in images}

    def said(self, words: str, timeout_s: float) -> str:
        """The message of a controller with these words, once there is one."""
        found: list[str] = []

        def there() -> bool:
            lines = self.cluster.kubectl("logs", "--selector", f"{COMPONENT}=controller", "--tail=2000").splitlines()
            found.extend(line for line in lines if words in line)
            return bool(found)

        self.wait(f"a controller that says {words!r}", there, timeout_s)
        return str(json.loads(found[0])["msg"]) if found[0].startswith("{") else found[0]

    def ended(self, client: Client, job: Job, folder: Path) -> str:
        """Hash of the weights that a job exported, once it has succeeded without a loss."""
        job = client.wait(job.id, 240)
        results = job.results
        assert job.status == "succeeded", job.reason
        figures = {name: results[name] for name in ("samples_trained", "samples_dropped", "duplicates")}
        self.log(f"{job.id} succeeded: {figures}")
        samples = TINY["rollout.prompts_per_step"] * TINY["rollout.group_size"]
        assert figures["samples_trained"] == STEPS * samples
        assert figures["samples_dropped"] == {}
        [pod] = self.names("controller")
        command = (
            "kubectl",
            "--namespace",
            self.cluster.namespace,
            "exec",
            pod,
            "--",
            "tar",
            "-C",
            results["model"],
            "-c",
            ".",
        )
        archive = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return weights_hash(folder)


def _settings() -> list[str]:
    """One rollout that samples row by row, and a reward that scores picture by picture: the bits of a sample do not
    depend on other samples."""
    settings = {"function": "brightness:brightness", "path": "/etc/flowfleet/reward", "name": "brightness"}
    reward: dict[str, Any] = {"name": "brightness", "scorer": "python", "settings": settings}
    reward["files"] = {"brightness.py": (HERE / "brightness.py").read_text()}
    threads = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    return [
        *("--set", f"keda.enabled=true,rollout.maxBatch={MAX_BATCH}"),
        *("--set-json", f"rewards={json.dumps([reward])}", "--set-json", f"rollout.env={json.dumps(threads)}"),
    ]


def _job() -> dict[str, Any]:
    """The job of tests/faults, its trainer in two pods. Paths are those of the images."""
    own = {"schedule.steps": STEPS, "timeouts.hang_s": HANG_S}
    return changed(read_job_file(RECIPE["lora"]), {**TINY, **EXACT, **own})


def _ready(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    conditions = [(pod, pod["status"].get("conditions", ())) for pod in pods]
    return [
        pod for pod, found in conditions if any(one["type"] == "Ready" and one["status"] == "True" for one in found)
    ]


def _uid(pods: list[dict[str, Any]]) -> str:
    return str(pods[0]["metadata"]["uid"])
