"""What the chart makes of rewards' settings, of rewards of one's own, and of judges."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowfleet.scorers import known
from services.reward import scorers
from services.reward.__main__ import _parser
from services.reward.settings import read_settings
from tests.deploy.conftest import CHART, FULLNAME, Rendered, container, environment, flags, helm, selects

ROOT = Path(__file__).parents[2]
DIRECTORY = "/etc/flowfleet/reward"


@pytest.fixture(scope="module")
def everything() -> Rendered:
    return Rendered("everything")


def _settings(rendered: Rendered, suffix: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rendered.get("ConfigMap", suffix)["data"]["settings.json"])
    return found


# -- settings ------------------------------------------------------------------------------------------------------


def test_settings_reach_the_scorer_as_they_are(everything: Rendered, tmp_path: Path) -> None:
    """Read by the service's own code: whole numbers stay whole, however large."""
    pod = everything.pod("reward-counting")
    assert flags(pod)["--settings"] == f"{DIRECTORY}/settings.json"
    (mount,) = [item for item in container(pod)["volumeMounts"] if item["mountPath"] == DIRECTORY]
    assert mount["readOnly"] is True
    (volume,) = [item for item in pod["spec"]["volumes"] if item["name"] == mount["name"]]
    assert volume["configMap"] == {"name": f"{FULLNAME}-reward-counting"}
    for name, text in everything.get("ConfigMap", "reward-counting")["data"].items():
        (tmp_path / name).write_text(text)
    given = read_settings(tmp_path / "settings.json", [f"rubric={tmp_path}/counting.toml"])
    assert given["cache_size"] == 1_000_000
    assert isinstance(given["cache_size"], int)
    made = scorers.make("vlm", given, 1)
    assert made.score_range == (1.0, 5.0)


def test_the_service_takes_the_arguments_of_the_chart(everything: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ocr", "jpeg-compressibility", "taste", "counting", "far"):
        options = _parser().parse_args(container(everything.pod(f"reward-{name}"))["args"])
        assert options.scorer in scorers.SCORERS
        assert (options.settings is not None) == (name in ("taste", "counting", "far"))
    monkeypatch.setenv("JUDGE_AUTHORIZATION", "Bearer key")
    assert scorers.make("http", _settings(everything, "reward-far"), 1).name == "http"


def test_a_change_of_settings_alone_changes_the_checksum() -> None:
    def annotations(settings: str) -> Any:
        one = f'rewards=[{{"name":"a","scorer":"http","settings":{settings}}}]'
        return Rendered("nvidia", one).pod("reward-a")["metadata"]["annotations"]["checksum/settings"]

    first = annotations('{"url":"http://a","retries":1}')
    assert first == annotations('{"retries":1,"url":"http://a"}')
    assert first != annotations('{"url":"http://a","retries":2}')


def test_a_reward_without_settings_has_none_of_it() -> None:
    rendered = Rendered("nvidia")
    pod = rendered.pod("reward-ocr")
    assert "--settings" not in flags(pod)
    assert "checksum/settings" not in pod["metadata"]["annotations"]
    assert "fleet-flowfleet-reward-ocr" not in [doc["metadata"]["name"] for doc in rendered.kind("ConfigMap")]


def test_keys_come_from_secrets(everything: Rendered) -> None:
    pod = everything.pod("reward-far")
    assert environment(pod)["JUDGE_AUTHORIZATION"] == {"secretKeyRef": {"name": "judge", "key": "authorization"}}
    assert container(pod)["envFrom"] == [{"secretRef": {"name": "proxies"}}]


# -- rewards by models ---------------------------------------------------------------------------------------------


def test_each_scorer_has_the_image_of_its_description() -> None:
    rewards = [{"name": f"r{at}", "scorer": name, "judges": []} for at, name in enumerate(scorers.SCORERS)]
    rendered = Rendered("nvidia", f"rewards={json.dumps(rewards)}")
    images = {name: container(rendered.pod(f"reward-r{at}"))["image"] for at, name in enumerate(scorers.SCORERS)}
    assert images == {name: f"flowfleet-{folder.image}:0.1.0" for name, folder in known().items()}


def test_the_image_of_a_scorer_with_a_library_is_a_value() -> None:
    images = '{"registry":"r.example","rewardImageReward":"mine"}'
    rendered = Rendered("nvidia", 'rewards=[{"name":"taste","scorer":"image_reward"}]', f"images={images}")
    assert container(rendered.pod("reward-taste"))["image"] == "r.example/mine:0.1.0"


def test_accelerators_of_a_reward_are_those_of_pools(everything: Rendered) -> None:
    pod = everything.pod("reward-taste")
    assert container(pod)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert environment(pod)["FLOWFLEET_DEVICE"] == "cuda"
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert pod["spec"]["securityContext"]["supplementalGroups"] == [44]
    assert pod["spec"]["nodeSelector"] == {"accelerator": "h200"}
    assert [item["key"] for item in pod["spec"]["tolerations"]] == ["nvidia.com/gpu"]
    assert everything.get("Deployment", "reward-taste")["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert "FLOWFLEET_DEVICE" not in environment(everything.pod("reward-ocr"))


# -- rewards of one's own ------------------------------------------------------------------------------------------


def test_a_reward_of_ones_own_has_its_arguments_and_ports_alone(everything: Rendered) -> None:
    pod = everything.pod("reward-colour")
    assert container(pod)["args"] == ["--host=0.0.0.0", "--port=50051"]
    assert container(pod)["ports"] == [{"name": "grpc", "containerPort": 50051}]
    assert [port["port"] for port in everything.get("Service", "reward-colour")["spec"]["ports"]] == [50051]
    assert environment(pod)["FLOWFLEET_RPC_TOKEN"]["secretKeyRef"]["name"] == "fleet"


# -- judges --------------------------------------------------------------------------------------------------------


def test_a_judge_is_started_as_the_documentation_says(everything: Rendered) -> None:
    pod = everything.pod("judge-qwen")
    spec = container(pod)
    assert spec["command"] == ["vllm", "serve"]
    assert spec["args"][0] == "/weights/Qwen2.5-VL-7B-Instruct"
    found = flags(pod)
    assert json.loads(found["--limit-mm-per-prompt"]) == {"image": 8}
    assert (found["--max-model-len"], found["--max-logprobs"]) == ("8192", "20")
    assert (found["--served-model-name"], found["--tensor-parallel-size"]) == ("qwen", "2")
    assert found["--gpu-memory-utilization"] == "0.85"
    assert "--tensor-parallel-size" not in flags(everything.pod("judge-small"))
    (documented,) = re.findall(r"^    vllm serve (.*)$", (ROOT / "docs" / "scorers.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"--[a-z-]+", documented)) <= found.keys()


def test_a_judge_has_its_accelerators_memory_and_time(everything: Rendered) -> None:
    pod = everything.pod("judge-qwen")
    spec = container(pod)
    assert spec["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 2}
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["spec"]["volumes"]
    assert spec["startupProbe"]["periodSeconds"] * spec["startupProbe"]["failureThreshold"] == 1800
    slept = spec["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > slept
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], pod["metadata"]["labels"])
    assert not selects(spread["labelSelector"], everything.pod("judge-small")["metadata"]["labels"])
    assert everything.get("Deployment", "judge-qwen")["spec"]["replicas"] == 2
    assert everything.get("PodDisruptionBudget", "judge-qwen")["spec"]["maxUnavailable"] == "25%"
    small = everything.pod("judge-small")
    assert "runtimeClassName" not in small["spec"]
    assert "nvidia.com/gpu" not in container(small)["resources"]["limits"]


def test_a_judge_is_offline_and_has_no_token_of_the_fleet(everything: Rendered) -> None:
    given = environment(everything.pod("judge-qwen"))
    assert given["HF_HUB_OFFLINE"] == "1"
    assert given["VLLM_NO_USAGE_STATS"] == "1"
    assert not [name for name in given if name.startswith("FLOWFLEET_")]


def test_a_reward_finds_its_judge_by_the_name_of_its_service(everything: Rendered) -> None:
    service = everything.get("Service", "judge-qwen")
    (port,) = service["spec"]["ports"]
    assert _settings(everything, "reward-counting")["urls"] == [
        f"http://{service['metadata']['name']}:{port['port']}/v1"
    ]
    assert (
        _settings(everything, "reward-counting")["model"] == flags(everything.pod("judge-qwen"))["--served-model-name"]
    )


def test_urls_and_model_of_ones_own_win() -> None:
    rewards = '[{"name":"a","scorer":"vlm","judges":["q"],"settings":{"urls":["http://gate:80/v1"],"model":"m"}}]'
    rendered = Rendered("nvidia", f"rewards={rewards}", 'judges=[{"name":"q","model":"/m","servedModelName":"s"}]')
    assert _settings(rendered, "reward-a") == {"urls": ["http://gate:80/v1"], "model": "m"}
    rewards = rewards.replace('"model":"m"', '"rubric":"quality"')
    rendered = Rendered("nvidia", f"rewards={rewards}", 'judges=[{"name":"q","model":"/m","servedModelName":"s"}]')
    assert _settings(rendered, "reward-a")["model"] == "s"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (['judges=[{"name":"q"}]'], "judges[0] (q): give model"),
        (['judges=[{"name":"q","model":"/m"},{"name":"q","model":"/n"}]'], "judges[1] (q): the name is given twice"),
        (['rewards=[{"name":"a","scorer":"vlm","judges":["q"]}]'], "rewards[0] (a): judges names q, which is not in"),
        (
            ['judges=[{"name":"q","model":"/m"}]', 'accelerator={"backend":"gloo","resource":""}', "pools=[]"],
            "judges[0] (q): accelerators=1 but accelerator.backend is gloo",
        ),
        (['pools=[{"name":"p","accelerators":2}]'], "pools[0] (p): accelerators=2 needs the engine diffusers"),
        (['pools=[{"name":"p","adapterSlots":4}]'], "pools[0] (p): adapterSlots=4 needs the engine diffusers on one"),
        (
            ['pools=[{"name":"p","adapterSlots":4,"engine":"diffusers","accelerators":2}]'],
            "adapterSlots=4 needs the engine diffusers on one accelerator or on CPUs",
        ),
    ],
)
def test_what_cannot_work_is_told_by_name(settings: list[str], told: str) -> None:
    sets = [flag for setting in settings for flag in ("--set-json", setting)]
    done = helm("template", "fleet", str(CHART), *sets)
    assert done.returncode != 0
    assert told in done.stderr
