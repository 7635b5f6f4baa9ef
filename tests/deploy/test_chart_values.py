"""What values do to the objects that the chart renders: accelerators, trainers, Redis, volumes, secrets."""

from __future__ import annotations

import json
import subprocess
from base64 import b64decode
from pathlib import Path

import pytest

from flowfleet.hardware.devices import _BACKENDS as BACKENDS
from flowfleet.redis import acl as redis_acl
from flowfleet.redis.sentinel import parse
from flowfleet.rpc import kinds
from tests.deploy.conftest import (
    FULLNAME,
    Rendered,
    container,
    environment,
    flags,
    selects,
)

# -- accelerators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "resource", "device"),
    [("nvidia", "nvidia.com/gpu", "cuda"), ("ascend", "huawei.com/Ascend910", "npu"), ("cpu", "", "cpu")],
)
def test_accelerators_are_values(profile: str, resource: str, device: str) -> None:
    rendered = Rendered(profile)
    rollout, trainer = rendered.pod("rollout-default"), rendered.trainer["spec"]["template"]
    assert environment(rollout)["FLOWFLEET_DEVICE"] == environment(trainer)["FLOWFLEET_DEVICE"] == device
    assert device in BACKENDS
    limits = container(rollout)["resources"]["limits"]
    assert limits.get(resource) == (1 if resource else None)
    assert rendered.trainer["metadata"]["annotations"]["flowfleet.io/accelerator"] == resource
    assert [item["key"] for item in rollout["spec"].get("tolerations", [])] == ([resource] if resource else [])
    for suffix in ("controller", "reward-ocr", "redis"):
        assert "tolerations" not in rendered.pod(suffix)["spec"]


def test_accelerator_settings_reach_pods_with_accelerators_alone() -> None:
    rendered = Rendered("everything")
    trainer = rendered.trainer["spec"]["template"]
    for pod in (rendered.pod("rollout-default"), rendered.pod("rollout-large"), trainer):
        assert pod["spec"]["runtimeClassName"] == "nvidia"
        assert pod["spec"]["securityContext"]["supplementalGroups"] == [44]
        assert pod["spec"]["nodeSelector"]["accelerator"] == "h200"
        assert environment(pod)["NCCL_DEBUG"] == "WARN"
        assert {"name": "topology", "mountPath": "/etc/nccl", "readOnly": True} in container(pod)["volumeMounts"]
    on_cpus = rendered.pod("rollout-on-cpus")
    assert "runtimeClassName" not in on_cpus["spec"]
    assert "NCCL_DEBUG" not in environment(on_cpus)
    assert environment(on_cpus)["FLOWFLEET_DEVICE"] == "cpu"
    assert "limits" in container(on_cpus)["resources"]
    assert "nvidia.com/gpu" not in container(on_cpus)["resources"]["limits"]


def test_devices_may_be_slices_or_claims() -> None:
    rendered = Rendered("everything")
    assert "nvidia.com/mig-3g.71gb" in container(rendered.pod("rollout-slices"))["resources"]["limits"]
    claimed = rendered.pod("rollout-claimed")
    assert claimed["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    resources = container(claimed)["resources"]
    assert (resources["claims"], "nvidia.com/gpu" in resources["limits"]) == ([{"name": "gpu"}], False)
    assert environment(claimed)["FLOWFLEET_DEVICE"] == "cuda"

    claims = 'trainer.resourceClaims=[{"name":"gpus","resourceClaimTemplateName":"eight"}]'
    trainer = Rendered("nvidia", claims, 'accelerator.resource=""', 'pools=[{"name":"a","accelerators":0}]').trainer
    assert trainer["metadata"]["annotations"]["flowfleet.io/accelerator"] == ""
    assert container(trainer["spec"]["template"])["resources"]["claims"] == [{"name": "gpus"}]
    assert environment(trainer["spec"]["template"])["FLOWFLEET_DEVICE"] == "cuda"


def test_schedulers_and_init_containers_reach_their_pods() -> None:
    rendered = Rendered("everything")
    trainer = rendered.trainer["spec"]["template"]["spec"]
    assert (trainer["schedulerName"], [one["name"] for one in trainer["initContainers"]]) == ("gangs", ["weights"])
    large = rendered.pod("rollout-large")["spec"]
    assert (large["schedulerName"], [one["name"] for one in large["initContainers"]]) == ("gangs", ["warm"])
    assert "schedulerName" not in rendered.pod("rollout-default")["spec"]


def test_a_pool_sets_what_it_wants_and_keeps_the_other_defaults() -> None:
    rendered = Rendered("everything")
    large, default = rendered.pod("rollout-large"), rendered.pod("rollout-default")
    assert container(large)["resources"] == {
        "requests": {"cpu": "8"},
        "limits": {"memory": "256Gi", "nvidia.com/gpu": 2},
    }
    assert flags(large)["--engine"] == "diffusers"
    assert flags(large)["--sequence-parallel-size"] == "2"
    assert "--sequence-parallel-size" not in flags(default)
    assert flags(default)["--engine"] == "vllm-omni"
    assert flags(large)["--model"] == "/models/Wan 2.2 T2V A14B"
    assert flags(default)["--max-batch"] == "64"
    assert "--max-batch" not in flags(large)
    assert "--adapter-slots" not in flags(default)
    assert flags(large)["--stall-s"] == "1200"
    assert large["spec"]["nodeSelector"] == {"accelerator": "h200", "size": "large"}
    assert [item["key"] for item in large["spec"]["tolerations"]] == ["large", "nvidia.com/gpu"]
    (spread,) = large["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], large["metadata"]["labels"])
    assert not selects(spread["labelSelector"], default["metadata"]["labels"])
    assert rendered.get("PodDisruptionBudget", "rollout-large")["spec"]["maxUnavailable"] == "25%"
    assert rendered.get("ScaledObject", "rollout-large")["spec"]["cooldownPeriod"] == 300  # merged key by key
    assert [doc for doc in rendered.kind("PodDisruptionBudget") if doc["metadata"]["name"].endswith("on-cpus")] == []


def test_a_pool_samples_for_several_jobs_where_it_says_so() -> None:
    rendered = Rendered("nvidia", 'pools=[{"name":"a","engine":"diffusers","adapterSlots":8},{"name":"b"}]')
    assert flags(rendered.pod("rollout-a"))["--adapter-slots"] == "8"
    assert "--adapter-slots" not in flags(rendered.pod("rollout-b"))


def test_values_of_nothing_override() -> None:
    """0, false and "" of a pool are values too."""
    rendered = Rendered(
        "nvidia",
        "rollout.autoscaling.minReplicas=2",
        'rollout.model="/m"',
        'pools=[{"name":"a","accelerators":0,"model":"","autoscaling":{"minReplicas":0},"podDisruptionBudget":{"enabled":false}}]',
    )
    assert rendered.get("ScaledObject", "rollout-a")["spec"]["minReplicaCount"] == 0
    assert "--model" not in flags(rendered.pod("rollout-a"))
    assert environment(rendered.pod("rollout-a"))["FLOWFLEET_DEVICE"] == "cpu"
    assert not any(doc["metadata"]["name"].endswith("rollout-a") for doc in rendered.kind("PodDisruptionBudget"))


# -- the trainer -----------------------------------------------------------------------------------------------------


def test_the_trainer_is_an_indexed_job_of_one_attempt(any_profile: Rendered) -> None:
    job = any_profile.trainer
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert container(spec["template"])["name"] == "trainer"
    assert "args" not in container(spec["template"])
    assert "command" not in container(spec["template"])
    service = any_profile.get("Service", "trainer")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert {"name": "state", "mountPath": "/var/lib/flowfleet"} in container(spec["template"])["volumeMounts"]


def test_kueue_admits_trainers_where_a_queue_is_named() -> None:
    job = Rendered("everything").trainer
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "fleet"
    assert job["spec"]["suspend"] is True
    plain = Rendered("nvidia").trainer
    assert "suspend" not in plain["spec"]
    assert "kueue.x-k8s.io/queue-name" not in plain["metadata"]["labels"]


def test_trainers_of_one_job_spread_among_themselves() -> None:
    (spread,) = Rendered("everything").trainer["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["matchLabelKeys"] == ["flowfleet.io/job"]
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "trainer"


@pytest.mark.parametrize(("profile", "ranks"), [("nvidia", "8"), ("cpu", "1")])
def test_a_pod_of_a_trainer_has_the_ranks_of_a_node(profile: str, ranks: str) -> None:
    assert Rendered(profile).trainer["metadata"]["annotations"]["flowfleet.io/ranks-per-pod"] == ranks


# -- Redis, state, blobs ---------------------------------------------------------------------------------------------


def test_all_who_need_redis_are_given_it(any_profile: Rendered) -> None:
    bundled = bool(any_profile.kind("StatefulSet"))
    for name, pod in any_profile.pods():
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        url = environment(pod).get("FLOWFLEET_REDIS_URL")
        user = "" if any_profile.kind("Secret") == [] else component  # Secrets of one's own have one for all
        if component in ("controller", "rollout", "trainer"):
            assert url, name
            assert isinstance(url, str) == bundled
            if bundled:
                names = [item["name"] for item in container(pod)["env"]]
                assert names.index("FLOWFLEET_REDIS_PASSWORD") < names.index("FLOWFLEET_REDIS_URL")  # it refers to it
                assert f"://{user}:$(FLOWFLEET_REDIS_PASSWORD)@{FULLNAME}-redis" in url
        else:
            assert url is None, name


def test_one_redis_is_found_by_its_service_and_three_by_their_sentinels() -> None:
    one = environment(Rendered("cpu").pod("rollout-default"))["FLOWFLEET_REDIS_URL"]
    assert one == f"redis://rollout:$(FLOWFLEET_REDIS_PASSWORD)@{FULLNAME}-redis:6379/0"
    assert "--redis-acks" not in flags(Rendered("cpu").pod("controller"))
    rendered = Rendered("ha-redis", "redis.highAvailability.minReplicasToWrite=2")
    assert flags(rendered.pod("controller"))["--redis-acks"] == "2"
    assert "\nmin-replicas-to-write 2\n" in rendered.get("ConfigMap", "redis-ha")["data"]["redis.conf"]
    url = parse(environment(rendered.pod("rollout-default"))["FLOWFLEET_REDIS_URL"])
    hosts = [f"{FULLNAME}-redis-ha-{number}.{FULLNAME}-redis-ha.ns.svc" for number in range(3)]
    assert (url.sentinels, url.name, url.tls) == (tuple((host, 26379) for host in hosts), "flowfleet", True)
    password = "$(FLOWFLEET_REDIS_PASSWORD)"
    assert url.asking == {"ssl": True, "username": "rollout", "password": password}
    assert url.connection["ssl_certfile"] == "/etc/flowfleet/tls/tls.crt"
    names = next(doc for doc in rendered.kind("Certificate") if doc["metadata"]["name"].endswith("-tls-redis"))
    assert f"*.{FULLNAME}-redis-ha.ns.svc" in names["spec"]["dnsNames"]
    shared = environment(
        Rendered("nvidia", 'redis={"auth":{"existingSecret":"mine"},"highAvailability":{"enabled":true}}').pod(
            "controller"
        )
    )
    assert parse(shared["FLOWFLEET_REDIS_URL"]).asking == {"password": password}


def test_a_highly_available_redis_is_spread_and_keeps_two_of_its_pods() -> None:
    rendered = Rendered("ha-redis")
    workload = rendered.get("StatefulSet", "redis-ha")
    pod = workload["spec"]["template"]
    assert (workload["spec"]["replicas"], workload["spec"]["podManagementPolicy"]) == (3, "Parallel")
    (apart,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert selects(apart["labelSelector"], pod["metadata"]["labels"])
    assert rendered.get("PodDisruptionBudget", "redis-ha")["spec"]["maxUnavailable"] == 1
    service = rendered.get("Service", "redis-ha")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert workload["spec"]["serviceName"] == f"{FULLNAME}-redis-ha"
    server, sentinel = pod["spec"]["containers"]
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sh", "/etc/redis/leave.sh"]
    for one in (server, sentinel):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["livenessProbe"]["exec"]["command"][1] == "/etc/redis/alive.sh"
        hosts = {item["name"]: item.get("value") for item in one["env"]}
        assert hosts["REDIS_SELF"] == f"$(POD_NAME).{FULLNAME}-redis-ha.ns.svc"
        assert hosts["REDIS_PEERS"].split()[2] == f"{FULLNAME}-redis-ha-2.{FULLNAME}-redis-ha.ns.svc"
    own = Rendered("ha-redis", 'redis.affinity={"nodeAffinity":{}}').pod("redis-ha")["spec"]["affinity"]
    assert own == {"nodeAffinity": {}}
    assert "affinity" not in Rendered("nvidia").pod("redis")["spec"]


def test_a_redis_that_hangs_fails_its_liveness_probe() -> None:
    probe = container(Rendered("nvidia").pod("redis"))["livenessProbe"]
    assert probe["exec"]["command"] == ["sh", "/etc/redis/alive.sh"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 60


def test_an_external_redis_leaves_nothing_of_the_bundled_one() -> None:
    rendered = Rendered("external-redis")
    assert rendered.kind("StatefulSet") == []
    assert not any(doc["metadata"]["name"].endswith("-redis") for doc in rendered.objects)
    url = environment(rendered.pod("controller"))["FLOWFLEET_REDIS_URL"]
    assert url == {"secretKeyRef": {"name": "fleet-redis", "key": "url"}}


def test_redis_gets_its_password_by_stdin_alone() -> None:
    rendered = Rendered("nvidia")
    pod = rendered.pod("redis")
    files = rendered.get("ConfigMap", "redis")["data"]
    assert container(pod)["command"] == ["sh", "/etc/redis/start.sh"]
    assert "requirepass" not in files["redis.conf"]
    assert "exec redis-server - <<END" in files["start.sh"]
    assert environment(pod)["REDISCLI_AUTH"] == {"secretKeyRef": {"name": f"{FULLNAME}-redis", "key": "password"}}
    assert "appendonly yes" in files["redis.conf"]


def test_redis_gives_data_half_of_its_memory_and_lines_of_the_user_win(tmp_path: Path) -> None:
    """start.sh as it is, but for its paths, with a redis-server that shows what it is given."""
    for own, expected in (("", ["maxmemory 512"]), ("maxmemory 7", ["maxmemory 512", "maxmemory 7"])):
        files = Rendered("nvidia", f"redis.config={json.dumps(own)}").get("ConfigMap", "redis")["data"]
        for name, text in files.items():
            (tmp_path / name).write_text(text.replace("/etc/redis", str(tmp_path)))
        (tmp_path / "redis-server").write_text("#!/bin/sh\nexec cat\n")
        (tmp_path / "redis-server").chmod(0o755)
        given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDISCLI_AUTH": "secret", "MEMORY_LIMIT_BYTES": "1024"}
        done = subprocess.run(["sh", str(tmp_path / "start.sh")], env=given, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert [line for line in lines if line.startswith("maxmemory ")] == expected
        assert "requirepass secret" in lines
        assert not any(line.startswith("user ") for line in lines)


def test_redis_has_a_user_for_each_kind_with_its_password(tmp_path: Path) -> None:
    """start.sh as it is, but for its paths, and what it starts is the machine's Redis."""
    rendered = Rendered("nvidia")
    given = environment(rendered.pod("redis"))
    for kind in redis_acl.RULES:
        key = {"name": f"{FULLNAME}-redis", "key": f"password-{kind}"}
        assert given[f"REDIS_PASSWORD_{kind}"]["secretKeyRef"] == key
        pod = rendered.trainer["spec"]["template"] if kind == "trainer" else rendered.pod(_A_POD[kind])
        assert environment(pod)["FLOWFLEET_REDIS_PASSWORD"]["secretKeyRef"] == key
    files = rendered.get("ConfigMap", "redis")["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("/etc/redis", str(tmp_path)))
    (tmp_path / "redis-server").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "redis-server").chmod(0o755)
    passwords = {kind: f"word-of-{kind}" for kind in redis_acl.RULES}
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDISCLI_AUTH": "secret", "MEMORY_LIMIT_BYTES": "1024"}
    env |= {f"REDIS_PASSWORD_{kind}": word for kind, word in passwords.items()}
    done = subprocess.run(["sh", str(tmp_path / "start.sh")], env=env, capture_output=True, text=True, check=True)
    users = "".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("user "))
    assert users == redis_acl.config_lines(passwords)
    bad = subprocess.run(["sh", str(tmp_path / "start.sh")], env={**env, "REDIS_PASSWORD_rollout": "a b"}, check=False)
    assert bad.returncode == 2


_A_POD = {"controller": "controller", "rollout": "rollout-default"}


def test_each_kind_has_the_tokens_that_it_sends_and_accepts() -> None:
    rendered = Rendered("nvidia")
    pods = {"trainer": rendered.trainer["spec"]["template"], "reward": rendered.pod("reward-ocr")}
    pods |= {kind: rendered.pod(name) for kind, name in _A_POD.items()}

    def tokens(kind: str) -> dict[str, str]:
        found = environment(pods[kind]).items()
        return {name: value["secretKeyRef"]["key"] for name, value in found if name.startswith(TOKENS)}

    assert tokens("controller") == {
        "FLOWFLEET_RPC_TOKEN": "rpc-token",
        "FLOWFLEET_REWARD_RPC_TOKEN": "rpc-token-reward",
        "FLOWFLEET_ROLLOUT_RPC_TOKEN": "rpc-token-rollout",
        "FLOWFLEET_TRAINER_RPC_TOKEN": "rpc-token-trainer",
        "FLOWFLEET_TRAINER_RPC_ACCEPT": "rpc-token-accept",
    }
    assert tokens("trainer") == {
        "FLOWFLEET_RPC_TOKEN": "rpc-token-trainer",
        "FLOWFLEET_RPC_ACCEPT": "rpc-token-accept",
        "FLOWFLEET_REWARD_RPC_TOKEN": "rpc-token-reward",
    }
    assert tokens("rollout") == {"FLOWFLEET_RPC_TOKEN": "rpc-token-replica", "FLOWFLEET_RPC_ACCEPT": "rpc-token-accept"}
    assert tokens("reward") == {"FLOWFLEET_RPC_TOKEN": "rpc-token-reward"}
    stored = {name: b64decode(value).decode() for name, value in rendered.get("Secret", "secrets")["data"].items()}
    suffixes = {"controller": "", "rollout": "-replica", "sampler": "-rollout", "trainer": "-trainer"}
    held = {caller: stored[f"rpc-token{suffix}"] for caller, suffix in suffixes.items()}
    assert stored["rpc-token-accept"] == kinds.accept(held)  # type: ignore[arg-type]


TOKENS = ("FLOWFLEET_RPC_", "FLOWFLEET_REWARD_", "FLOWFLEET_ROLLOUT_", "FLOWFLEET_TRAINER_")


def test_secrets_of_ones_own_have_one_entry_or_one_a_kind() -> None:
    def keys(*settings: str) -> list[str]:
        rendered = Rendered("nvidia", *settings)
        rollout, trainer = rendered.pod("rollout-default"), rendered.trainer["spec"]["template"]
        values = [*environment(rollout).values(), *environment(trainer).values()]
        return [value["secretKeyRef"]["key"] for value in values if isinstance(value, dict) and "secretKeyRef" in value]

    token, redis = 'secrets.rpcToken.existingSecret="mine"', 'redis.auth.existingSecret="mine"'
    assert keys(token, redis) == ["rpc-token", "password"] * 2
    assert keys(token, redis, "secrets.rpcToken.perKind=true", "redis.auth.perKind=true") == [
        *("rpc-token-replica", "rpc-token-accept", "password-rollout"),
        *("rpc-token-trainer", "rpc-token-reward", "rpc-token-accept", "password-trainer"),
    ]
    url = environment(Rendered("external-redis", "redis.external.perKind=true").pod("controller"))[
        "FLOWFLEET_REDIS_URL"
    ]
    assert url == {"secretKeyRef": {"name": "fleet-redis", "key": "url-controller"}}


def test_claims_go_with_the_release_or_stay_as_the_values_say() -> None:
    def kept(rendered: Rendered) -> tuple[str, str | None]:
        redis = rendered.get("StatefulSet", "redis")["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"]
        state = rendered.get("PersistentVolumeClaim", "state")["metadata"]
        return redis, state.get("annotations", {}).get("helm.sh/resource-policy")

    assert kept(Rendered("nvidia")) == ("Delete", "keep")
    assert kept(Rendered("cpu")) == ("Delete", None)
    assert kept(Rendered("everything")) == ("Retain", "keep")


def test_an_existing_claim_is_used_as_it_is() -> None:
    rendered = Rendered("nvidia", 'state.existingClaim="mine"')
    assert rendered.kind("PersistentVolumeClaim") == []
    for pod in (rendered.pod("controller"), rendered.trainer["spec"]["template"]):
        assert {"name": "state", "persistentVolumeClaim": {"claimName": "mine"}} in pod["spec"]["volumes"]


def test_models_and_stores_reach_controller_rollouts_and_trainers() -> None:
    rendered = Rendered("everything")
    for name, pod in rendered.pods():
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        has_models = any(mount["mountPath"] == "/models" for mount in container(pod)["volumeMounts"])
        assert has_models == (component in ("controller", "rollout", "trainer")), name
        if has_models:
            assert environment(pod)["FLOWFLEET_BLOBS"] == "s3://fleet-blobs/run"
            assert environment(pod)["AWS_REGION"] == "eu-west-1"
            assert container(pod)["envFrom"] == [{"secretRef": {"name": "object-store"}}]


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_that_are_given_are_not_made() -> None:
    rendered = Rendered("everything")
    assert rendered.kind("Secret") == []
    controller = environment(rendered.pod("controller"))
    assert controller["FLOWFLEET_API_KEY"]["secretKeyRef"] == {"name": "fleet", "key": "api.key"}
    assert controller["FLOWFLEET_RPC_TOKEN"]["secretKeyRef"] == {"name": "fleet", "key": "rpc-token"}
    assert controller["FLOWFLEET_REDIS_PASSWORD"]["secretKeyRef"] == {"name": "fleet", "key": "redis"}


def test_limits_and_archive_reach_the_controller() -> None:
    pod = Rendered("everything").pod("controller")
    (container,) = pod["spec"]["containers"]
    assert "--limit=samples_per_step=8192" in container["args"]
    kept = [argument for argument in container["args"] if argument.startswith("--keep=")]
    assert sorted(kept) == ["--keep=days=0.5", "--keep=jobs=200"]
    assert environment(pod)["FLOWFLEET_ARCHIVE"] == "s3://bucket/jobs"


def test_traces_reach_all_services_of_the_fleet_and_no_judge_or_redis() -> None:
    rendered = Rendered("everything")
    tracing = {name: env for name, pod in rendered.pods() if "OTEL_EXPORTER_OTLP_ENDPOINT" in (env := environment(pod))}
    kinds = ("controller", "rollout", "reward")
    assert {name.split("-")[2] for name in tracing if name.startswith(FULLNAME)} == set(kinds)
    trainer = environment(rendered.trainer["spec"]["template"])
    for env in (*tracing.values(), trainer):
        assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.observability.svc:4317"
        assert env["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
        assert env["OTEL_TRACES_SAMPLER_ARG"] == "0.1"
    (controller,) = (env for name, env in tracing.items() if "FLOWFLEET_TRACE_URL" in env)
    assert controller["FLOWFLEET_TRACE_URL"] == "https://jaeger.example.com/trace/{trace_id}"
    off = [environment(pod) for _, pod in Rendered("nvidia").pods()]
    assert not any(name.startswith("OTEL_") for env in off for name in env)


def test_the_api_key_is_given_to_none_but_the_controller_and_the_test(any_profile: Rendered) -> None:
    have = {name for name, pod in any_profile.pods() if "FLOWFLEET_API_KEY" in environment(pod)}
    assert have == {f"{FULLNAME}-controller", "test"}
