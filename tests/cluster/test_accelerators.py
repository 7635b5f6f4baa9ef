"""Pods of the chart's NVIDIA profile on a node that pretends to have 64 GPUs, by a controller as the chart runs it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import SecretStr

from services.controller.app import create_app
from services.controller.jobs.scheduler import JobScheduler
from services.controller.settings import ControllerSettings
from tests.cluster.conftest import CHART, Cluster, run
from tests.cluster.stand_in import RELEASE, idle, owner
from tests.deploy.conftest import API_SERVER
from tests.waiting import until

GPUS = 64
LABEL = "flowfleet-test/accelerated"


@pytest.fixture
def gpus() -> Iterator[str]:
    """Name of a node that says it has GPUs."""
    node = json.loads(run("kubectl", "get", "nodes", "--output", "json"))["items"][0]["metadata"]["name"]

    def patch(*operations: dict[str, Any]) -> None:
        run("kubectl", "patch", "node", node, "--subresource=status", "--type=json", "--patch", json.dumps(operations))

    place = "/status/capacity/nvidia.com~1gpu"
    patch({"op": "add", "path": place, "value": str(GPUS)})
    run("kubectl", "label", "node", node, f"{LABEL}=true", "--overwrite")
    try:
        yield node
    finally:
        run("kubectl", "label", "node", node, f"{LABEL}-")
        patch({"op": "remove", "path": place})


def chart(cluster: Cluster, *templates: str) -> list[dict[str, Any]]:
    """Objects of the NVIDIA profile. Their pods ask for accelerators as there, and do nothing."""
    values = {"fullnameOverride": RELEASE, "keda": {"enabled": False}, "rollout": {"replicas": 1}}
    values |= {"accelerator": {"nodeSelector": {LABEL: "true"}}}
    shown = [flag for name in templates for flag in ("--show-only", f"templates/{name}.yaml")]
    command = ("helm", "template", RELEASE, str(CHART), "--namespace", cluster.namespace, *API_SERVER, "--values", "-")
    rendered = run(*command, *shown, stdin=json.dumps(values))
    return [found for found in yaml.safe_load_all(rendered) if found]


def placed_only(pod: dict[str, Any]) -> dict[str, Any]:
    """A pod's spec with its placement and accelerators, but without what it would run and mount."""
    limits = pod["containers"][0]["resources"].get("limits", {})
    kept = {name: amount for name, amount in limits.items() if "/" in name}
    made = idle(pod["containers"][0]["name"], **kept)
    placement: dict[str, Any] = {
        key: pod[key] for key in ("nodeSelector", "tolerations", "restartPolicy", "subdomain") if key in pod
    }
    return {**placement, "terminationGracePeriodSeconds": 1, "containers": [made]}


@pytest.fixture
def template(cluster: Cluster, tmp_path: Path) -> Path:
    """The trainers' of the chart; the release's pools, and a reward, are applied."""
    trainers = next(item for item in chart(cluster, "trainer") if item["kind"] == "ConfigMap")
    job = yaml.safe_load(trainers["data"]["trainer.yaml"])
    job["spec"]["template"]["spec"] = placed_only(job["spec"]["template"]["spec"])
    path = tmp_path / "trainer.yaml"
    path.write_text(yaml.safe_dump(job))
    cluster.apply(owner())
    for item in chart(cluster, "rollout", "reward"):
        if item["kind"] == "Deployment":
            item["spec"]["template"]["spec"] = placed_only(item["spec"]["template"]["spec"])
        if item["kind"] in ("Deployment", "Service"):
            cluster.apply(item)
    return path


@asynccontextmanager
async def controller(cluster: Cluster, template: Path, redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = ControllerSettings(
        redis_url=SecretStr(redis_url),
        state_dir=template.parent / "state",
        data_roots=(template.parent,),
        kubernetes=RELEASE,
        namespace=cluster.namespace,
        trainer_template=template,
        owner=f"{RELEASE}-controller",
    )
    app = create_app(settings, JobScheduler)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8470") as client,
    ):
        yield client


def job(folder: Path, ranks: int) -> dict[str, Any]:
    model, prompts = folder / "model", folder / "prompts.txt"
    model.mkdir(exist_ok=True)
    (model / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    prompts.write_text('A red sign that says "K7QX"\n')
    parts = {"model": {"path": str(model)}, "rewards": {"ocr": {}}, "data": {"train": str(prompts)}}
    return {**parts, "trainer": {"world_size": ranks}}


def placed(pods: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(node, GPUs) of each pod."""
    limits = [pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods]
    return [(pod["spec"].get("nodeName", ""), limit) for pod, limit in zip(pods, limits, strict=True)]


@pytest.mark.long
async def test_pools_and_trainers_are_placed_and_one_too_large_is_told(
    cluster: Cluster, gpus: str, template: Path, redis_url: str
) -> None:
    async def pods(component: str) -> list[dict[str, Any]]:
        selector = f"app.kubernetes.io/component={component}"
        return list(await asyncio.to_thread(cluster.get, "pods", "--selector", selector))

    async def scenario() -> None:
        async with controller(cluster, template, redis_url) as client:

            async def submit(ranks: int) -> str:
                response = await client.post("/v1/jobs", json=job(template.parent, ranks))
                assert response.status_code == 202, response.text
                return f"/v1/jobs/{response.json()['id']}"

            async def reason(url: str) -> str:
                return str((await client.get(url)).json()["reason"])

            async def count(component: str, wanted: int) -> bool:
                return len(await pods(component)) == wanted

            await until(lambda: count("rollout", 1))
            refused = await client.post("/v1/jobs", json={**job(template.parent, 8), "rollout": {"pool": "none"}})
            assert "rollout.pool = 'none': this fleet has no such pool; it has: default" in refused.text
            fits = await submit(16)
            await until(lambda: count("trainer", 2), 60)
            await until(lambda: _all_placed(pods), 30)
            assert placed(await pods("trainer")) == [(gpus, "8")] * 2
            assert placed(await pods("rollout")) == [(gpus, "1")]
            await client.post(f"{fits}/cancel")
            await until(lambda: count("trainer", 0), 60)

            too_large = await submit(GPUS + 8)
            told = r"trainer: 0/\d+ nodes are available: .*Insufficient nvidia.com/gpu.*\(2 of 9 pods\); 9 pods of 8 nv"

            async def is_told() -> bool:
                return re.search(told, await reason(too_large)) is not None

            await until(is_told, 60)
            events = (await client.get(f"{too_large}/events")).json()["items"]
            assert any(re.search(told, json.dumps(event)) for event in events), events
            await client.post(f"{too_large}/cancel")
            await until(lambda: count("trainer", 0), 60)

            more = ("set", "resources", f"deployment/{RELEASE}-rollout-default", f"--limits=nvidia.com/gpu={GPUS + 1}")
            await asyncio.to_thread(cluster.kubectl, *more)

            async def is_short() -> bool:
                shortages = (await client.get("/v1/fleet")).json()["shortages"]
                return any("Insufficient nvidia.com/gpu" in found["reason"] for found in shortages)

            await until(is_short, 60)
            metrics = (await client.get("/metrics")).text
            assert 'flowfleet_unschedulable_pods{component="rollout",name="default"}' in metrics

    async def _all_placed(pods: Any) -> bool:
        return all(node for node, _ in placed(await pods("trainer")) + placed(await pods("rollout")))

    await asyncio.wait_for(scenario(), 300)
