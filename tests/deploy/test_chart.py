"""What the chart renders: objects of each template, for each profile and variant."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flowfleet.rpc.kinds import of_certificate
from services.controller.platforms.kubernetes.template import parse_template
from tests.deploy.conftest import (
    ALL,
    API_SERVER,
    CHART,
    FULLNAME,
    Object,
    Rendered,
    container,
    environment,
    flags,
    helm,
    selects,
    values_of,
)

SECRETS = (
    "FLOWFLEET_API_KEY",
    "FLOWFLEET_RPC_TOKEN",
    "FLOWFLEET_REWARD_RPC_TOKEN",
    "FLOWFLEET_ROLLOUT_RPC_TOKEN",
    "FLOWFLEET_RPC_ACCEPT",
    "FLOWFLEET_REDIS_PASSWORD",
    "REDISCLI_AUTH",
    "REDIS_PASSWORD_controller",
    "REDIS_PASSWORD_rollout",
    "REDIS_PASSWORD_trainer",
)
"""Environment variables that hold one."""


@pytest.mark.parametrize("name", ALL)
def test_lint_is_content(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), *API_SERVER, *values_of(name))
    assert done.returncode == 0, done.stdout + done.stderr


# -- every object ----------------------------------------------------------------------------------------------------


def test_objects_are_labeled_by_convention_and_named_once(any_profile: Rendered) -> None:
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in any_profile.objects]
    assert len(set(names)) == len(names)
    for doc in any_profile.objects:
        labels = doc["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "flowfleet"
        assert labels["app.kubernetes.io/instance"] == "fleet"
        assert labels["app.kubernetes.io/part-of"] == "flowfleet"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert "app.kubernetes.io/component" in labels
        if doc["kind"] != "Pod":
            assert labels["helm.sh/chart"] == "flowfleet-0.1.0"
            assert labels["app.kubernetes.io/version"] == "0.1.0"


def test_common_labels_and_annotations_are_on_every_object() -> None:
    for doc in Rendered("everything").objects:
        assert doc["metadata"]["labels"]["team"] == "images", doc["metadata"]["name"]
        assert doc["metadata"]["annotations"]["example.com/owner"] == "images", doc["metadata"]["name"]


def test_names_stay_within_63_characters() -> None:
    longest = "p" * 24
    judge = f'{{"name":"{longest}","model":"/m"}}'
    rendered = Rendered(
        "nvidia",
        f'pools=[{{"name":"{longest}"}}]',
        f'fullnameOverride="{"f" * 40}"',
        f'rewards=[{{"name":"{longest}","scorer":"ocr","settings":{{"a":1}},"judges":["{longest}"]}}]',
        f"judges=[{judge}]",
    )
    assert max(len(doc["metadata"]["name"]) for doc in rendered.objects) == 63


# -- every pod -------------------------------------------------------------------------------------------------------


def test_pods_meet_the_restricted_standard(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["runAsGroup"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["enableServiceLinks"] is False
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for one in (container(pod), *spec.get("initContainers", ())):
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_the_controller_gets_a_token_of_the_api_server(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        is_controller = name == f"{FULLNAME}-controller"
        assert pod["spec"]["automountServiceAccountToken"] is is_controller, name
        assert pod["spec"]["serviceAccountName"] == (name if is_controller else FULLNAME)
    assert all(account["automountServiceAccountToken"] is False for account in any_profile.kind("ServiceAccount"))


def test_secrets_come_from_secrets_alone(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        for variable, value in environment(pod).items():
            if variable in SECRETS:
                assert list(value) == ["secretKeyRef"], f"{name}: {variable}"
        text = json.dumps(container(pod).get("args", []) + container(pod).get("command", []))
        assert not any(f"$({variable})" in text for variable in SECRETS), name
    secret_values = [value for doc in any_profile.kind("Secret") for value in doc["data"].values()]
    others = json.dumps([doc for doc in any_profile.objects if doc["kind"] != "Secret"])
    assert not any(value in others for value in secret_values)


def test_pods_write_to_tmp_and_their_volumes_are_there(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
        is_redis = name.endswith(("-redis", "-redis-ha"))
        claimed = {"data"} if is_redis else set()
        assert mounts["tmp"] == "/tmp"
        assert mounts.keys() <= volumes | claimed, name
        assert len(pod["spec"]["volumes"]) == len(volumes)
        assert len(set(mounts.values())) == len(mounts)
        if not is_redis:
            assert environment(pod)["HOME"] == "/tmp"


def test_images_are_pinned(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        image = container(pod)["image"]
        _, _, tag = image.rpartition("/")[2].partition(":")
        assert tag not in ("", "latest"), f"{name}: {image}"


def test_images_take_registry_and_tag_and_a_pool_its_own() -> None:
    rendered = Rendered("everything")
    images = {name.removeprefix(f"{FULLNAME}-"): container(pod)["image"] for name, pod in rendered.pods()}
    assert images["controller"] == images["test"] == "registry.example.com/ml/flowfleet-controller:0.1.0-cuda"
    assert images["rollout-default"] == "registry.example.com/ml/flowfleet-rollout:0.1.0-cuda"
    assert images["rollout-large"] == "registry.example.com/ml/rollout:next"
    assert images["trainer"] == "registry.example.com/ml/flowfleet-trainer:0.1.0-cuda"
    assert images["reward-own"] == "registry.example.com/ml/own-reward:3"
    assert all(pod["spec"]["imagePullSecrets"] == [{"name": "registry"}] for _, pod in rendered.pods())


def test_an_image_with_a_digest_takes_no_tag() -> None:
    digest = "sha256:" + "5" * 64
    names = ("controller", "rollout", "trainer", "reward", "redis")
    pinned = [f'images.{name}="flowfleet-{name}@{digest}"' for name in names]
    rendered = Rendered("nvidia", *pinned, 'images.registry="registry.example.com/ml"', 'images.tag="0.1.0-cuda"')
    images = {name.removeprefix(f"{FULLNAME}-"): container(pod)["image"] for name, pod in rendered.pods()}
    assert images["redis"] == f"flowfleet-redis@{digest}", "a whole reference"
    for pod, name in zip(("controller", "rollout-default", "trainer", "reward-ocr"), names, strict=False):
        assert images[pod] == f"registry.example.com/ml/flowfleet-{name}@{digest}"


def test_probes_are_grpc_on_the_health_port_and_http_for_the_controller(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        spec = container(pod)
        probes = [spec.get(f"{probe}Probe", {}) for probe in ("startup", "liveness", "readiness")]
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if component in ("rollout", "reward"):
            own = "reward-colour" in name
            assert all(probe["grpc"] == {"port": 50051 if own else 7001} for probe in probes), name
        elif component == "judge":
            assert all(probe["httpGet"] == {"path": "/health", "port": "http"} for probe in probes), name
        elif name.endswith("-controller"):
            scheme = "HTTPS" if "FLOWFLEET_TLS_DIR" in environment(pod) else "HTTP"
            assert [probe["httpGet"]["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
            assert all(probe["httpGet"]["scheme"] == scheme for probe in probes)


def test_a_pool_may_start_and_drain_for_as_long_as_its_values_say() -> None:
    pod = Rendered("nvidia").pod("rollout-default")
    probe = container(pod)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800
    assert flags(pod)["--drain-s"] == "600"
    assert pod["spec"]["terminationGracePeriodSeconds"] > 600 + 30  # what running calls get after the drain


def test_a_reward_drains_for_as_long_as_its_values_say() -> None:
    pod = Rendered("nvidia", "reward.preStopSeconds=7", "reward.drainSeconds=40").pod("reward-ocr")
    assert flags(pod)["--drain-s"] == "40"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 7 + 40 + 15


def test_a_trainer_drains_for_as_long_as_its_values_say(any_profile: Rendered) -> None:
    job = any_profile.trainer
    drain_s = int(job["metadata"]["annotations"]["flowfleet.io/drain-s"])
    assert drain_s <= 25
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == drain_s + 15
    assert parse_template(job).drain_s == drain_s


@pytest.mark.parametrize("suffix", ["controller", "reward-ocr"])
def test_what_is_reached_by_a_service_leaves_it_before_it_ends(suffix: str) -> None:
    pod = Rendered("nvidia").pod(suffix)
    slept = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < slept < pod["spec"]["terminationGracePeriodSeconds"]


# -- services --------------------------------------------------------------------------------------------------------


def test_services_select_pods_and_name_their_ports(any_profile: Rendered) -> None:
    pods = [pod for _, pod in any_profile.pods()]
    for service in any_profile.kind("Service"):
        spec, name = service["spec"], service["metadata"]["name"]
        chosen = [pod for pod in pods if selects({"matchLabels": spec["selector"]}, pod["metadata"]["labels"])]
        assert len(chosen) == 1, name
        ports = {
            port["name"]: port["containerPort"] for one in chosen[0]["spec"]["containers"] for port in one["ports"]
        }
        assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"]), name


def test_selectors_match_the_pods_of_their_own_workload_alone(any_profile: Rendered) -> None:
    workloads = any_profile.kind("Deployment") + any_profile.kind("StatefulSet")
    labels = {name: pod["metadata"]["labels"] for name, pod in any_profile.pods()}
    for workload in workloads:
        chosen = [name for name, own in labels.items() if selects(workload["spec"]["selector"], own)]
        assert chosen == [workload["metadata"]["name"]]


def test_ports_are_those_of_the_contract() -> None:
    rendered = Rendered("nvidia")
    ports = {
        suffix: {port["name"]: port["port"] for port in rendered.get("Service", suffix)["spec"]["ports"]}
        for suffix in ("controller", "scaler", "rollout-default", "reward-ocr", "trainer", "redis")
    }
    assert ports == {
        "controller": {"http": 8470, "metrics": 9470},
        "scaler": {"scaler": 8471},
        "rollout-default": {"grpc": 7000, "metrics": 9470},
        "reward-ocr": {"grpc": 7000, "metrics": 9470},
        "trainer": {"grpc": 7000, "metrics": 9470, "rendezvous": 29500},
        "redis": {"redis": 6379},
    }


def test_endpoints_of_pools_and_rewards_inherit_their_names() -> None:
    rendered = Rendered("everything")
    for component, label, names in (
        ("rollout", "flowfleet.io/pool", ["default", "large", "on-cpus"]),
        ("reward", "flowfleet.io/reward", ["ocr", "jpeg_compressibility", "own", "colour"]),
    ):
        for name in names:
            suffix = f"{component}-{name.replace('_', '-')}"
            service, deployment = rendered.get("Service", suffix), rendered.get("Deployment", suffix)
            assert service["spec"]["clusterIP"] == "None"
            for metadata in (service["metadata"], deployment["metadata"], deployment["spec"]["template"]["metadata"]):
                assert metadata["labels"][label] == name


# -- the controller --------------------------------------------------------------------------------------------------


def test_the_controller_is_told_of_the_release() -> None:
    assert flags(Rendered("nvidia").pod("controller")) == {
        "--host": "0.0.0.0",
        "--port": "8470",
        "--scaler-port": "8471",
        "--metrics-port": "9470",
        "--state-dir": "/var/lib/flowfleet",
        "--kubernetes": "fleet",
        "--trainer-template": "/etc/flowfleet/trainer/trainer.yaml",
        "--owner": f"{FULLNAME}-controller",
        "--log-level": "info",
        "--data-root": "/app/recipes",
    }


def test_jobs_may_read_shared_volumes_recipes_and_what_the_values_name() -> None:
    arguments = container(Rendered("everything").pod("controller"))["args"]
    roots = [argument for argument in arguments if argument.startswith("--data-")]
    mounts = ("/app/recipes", "/models", "/data/prompts")
    networks = ["--data-url=s3://prompts", "--data-network=10.30.0.0/16"]
    assert roots == [*(f"--data-root={path}" for path in mounts), *networks]


def test_jobs_may_not_read_secrets_that_are_mounted_beside_models() -> None:
    kinds = {
        "secret": {"secretName": "store"},
        "configMap": {"name": "ca"},
        "projected": {"sources": []},
        "downwardAPI": {"items": []},
        "csi": {"driver": "secrets-store.csi.k8s.io"},
    }
    volumes = [{"name": kind.lower(), kind: source} for kind, source in kinds.items()]
    volumes += [{"name": "data", "csi": {"driver": "s3.csi.aws.com"}}]
    mounts = [{"name": volume["name"], "mountPath": f"/mnt/{volume['name']}"} for volume in volumes]
    rendered = Rendered("nvidia", f"volumes={json.dumps(volumes)}", f"volumeMounts={json.dumps(mounts)}")
    arguments = container(rendered.pod("controller"))["args"]
    assert [word for word in arguments if "data-root" in word] == ["--data-root=/app/recipes", "--data-root=/mnt/data"]


def test_updates_of_the_controller_leave_no_gap_and_those_of_accelerators_need_none_to_spare() -> None:
    rendered = Rendered("everything")

    def update(suffix: str) -> Any:
        return rendered.get("Deployment", suffix)["spec"]["strategy"]["rollingUpdate"]

    assert update("controller") == update("reward-ocr") == update("rollout-on-cpus")
    assert update("controller") == {"maxSurge": 1, "maxUnavailable": 0}
    assert update("rollout-default") == {"maxSurge": 0, "maxUnavailable": "25%"}
    assert update("reward-own") == {"maxSurge": 0, "maxUnavailable": 1}


def test_rbac_is_what_the_launcher_and_the_directory_need_and_no_more(any_profile: Rendered) -> None:
    (role,) = any_profile.kind("Role")
    queue = any_profile.trainer["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
    rules = {(rule["apiGroups"][0], rule["resources"][0]): rule for rule in role["rules"]}
    assert {key: rule["verbs"] for key, rule in rules.items()} == {
        ("batch", "jobs"): ["get", "list", "watch", "create", "delete"],
        ("", "pods"): ["get", "list", "watch", "delete", *(["patch"] if any_profile.kind("ScaledObject") else [])],
        ("", "secrets"): ["create"],
        ("", "events"): ["list"],
        **({("kueue.x-k8s.io", "workloads"): ["list"]} if queue else {}),
        ("discovery.k8s.io", "endpointslices"): ["get", "list", "watch"],
        ("apps", "deployments"): ["get"],
    }
    assert all(len(rule["apiGroups"]) == len(rule["resources"]) == 1 for rule in role["rules"])
    assert rules["apps", "deployments"]["resourceNames"] == [f"{FULLNAME}-controller"]
    (binding,) = any_profile.kind("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": f"{FULLNAME}-controller", "namespace": "ns"}]
    assert not any(doc["kind"].startswith("ClusterRole") for doc in any_profile.objects)


# -- upgrades --------------------------------------------------------------------------------------------------------

_OCR = '{"name":"ocr","scorer":"ocr"}'
_VLM = '{"name":"m","scorer":"motion","settings":{"a":%d}}'


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ('pools=[{"name":"a"}]', 'pools=[{"name":"a"},{"name":"b"}]', {"rollout-b"}),
        ('pools=[{"name":"a"},{"name":"b"}]', 'pools=[{"name":"b"}]', {"rollout-a"}),
        ('pools=[{"name":"a"},{"name":"b"}]', 'pools=[{"name":"a"},{"name":"b","image":"x:2"}]', {"rollout-b"}),
        (f"rewards=[{_OCR}]", f'rewards=[{_OCR},{{"name":"m","scorer":"motion"}}]', {"reward-m"}),
        (f"rewards=[{_OCR}]", "rewards=[]", {"reward-ocr"}),
        (f"rewards=[{_OCR}]", 'rewards=[{"name":"ocr","scorer":"ocr","image":"x:2"}]', {"reward-ocr"}),
        (
            f"rewards=[{_OCR},{_VLM % 1}]",
            f"rewards=[{_OCR},{_VLM % 2}]",
            {"reward-m"},
        ),
        ("judges=[]", 'judges=[{"name":"q","model":"/m"}]', {"judge-q"}),
        ("trainer.ranksPerPod=8", "trainer.ranksPerPod=4", {"trainer"}),  # read when the next job starts
        ('redis.config=""', 'redis.config="io-threads 2"', {"redis"}),
    ],
)
@pytest.mark.parametrize("name", ["nvidia", "mtls", "no-keda"])
def test_a_change_restarts_what_it_changes_alone(name: str, before: str, after: str, changed: set[str]) -> None:
    """A Deployment restarts when, and only when, its pod template differs."""
    first, second = (_restarting(Rendered(name, setting)) for setting in (before, after))
    differing = {suffix for suffix in first.keys() | second.keys() if first.get(suffix) != second.get(suffix)}
    assert differing == (changed - {"trainer"})


def _restarting(rendered: Rendered) -> dict[str, Object]:
    workloads = rendered.kind("Deployment") + rendered.kind("StatefulSet")
    return {doc["metadata"]["name"].removeprefix(f"{FULLNAME}-"): doc["spec"]["template"] for doc in workloads}


def test_a_new_version_of_the_chart_alone_restarts_nothing(any_profile: Rendered) -> None:
    for name, pod in any_profile.pods():
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & pod["metadata"]["labels"].keys(), name


# -- scaling ---------------------------------------------------------------------------------------------------------


def test_without_keda_replicas_are_static() -> None:
    rendered = Rendered("no-keda")
    assert rendered.kind("ScaledObject") == []
    assert rendered.get("Deployment", "rollout-default")["spec"]["replicas"] == 3
    assert rendered.get("Deployment", "reward-ocr")["spec"]["replicas"] == 2


@pytest.mark.parametrize("name", ["nvidia", "ascend", "mtls", "everything"])
def test_with_keda_each_pool_and_reward_has_a_scaled_object_and_no_replicas(name: str) -> None:
    rendered = Rendered(name)
    scaled = {doc["spec"]["scaleTargetRef"]["name"]: doc["spec"] for doc in rendered.kind("ScaledObject")}
    fixed = ("controller", "judge")
    every = rendered.kind("Deployment")
    deployments = [d for d in every if d["metadata"]["labels"]["app.kubernetes.io/component"] not in fixed]
    assert scaled.keys() == {doc["metadata"]["name"] for doc in deployments}
    for deployment in deployments:
        assert "replicas" not in deployment["spec"]
        spec = scaled[deployment["metadata"]["name"]]
        (trigger,) = spec["triggers"]
        labels = deployment["metadata"]["labels"]
        own = labels.get("flowfleet.io/pool") or labels["flowfleet.io/reward"]
        assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
        metadata = trigger["metadata"]
        assert metadata["scalerAddress"] == f"{FULLNAME}-scaler.ns.svc:8471"
        assert (metadata["component"], metadata["name"]) == (labels["app.kubernetes.io/component"], own)
        assert "maxReplicas" not in metadata  # the HPA sees to it
        assert all(isinstance(value, str) for value in metadata.values())
        assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"]


def test_budgets_cover_controller_pools_and_rewards(any_profile: Rendered) -> None:
    for budget in any_profile.kind("PodDisruptionBudget"):
        workloads = any_profile.kind("Deployment") + any_profile.kind("StatefulSet")
        workload = next(doc for doc in workloads if doc["metadata"]["name"] == budget["metadata"]["name"])
        assert budget["spec"]["selector"] == workload["spec"]["selector"]
        assert budget["spec"]["maxUnavailable"]
    covered = {budget["metadata"]["name"] for budget in any_profile.kind("PodDisruptionBudget")}
    assert f"{FULLNAME}-controller" in covered


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtls", "mtls-existing", "everything"])
def test_tls_is_everywhere(name: str) -> None:
    rendered = Rendered(name)
    for workload, pod in rendered.pods():
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "judge":  # vLLM's HTTP, which policies alone protect; the chart's README says so
            continue
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        owner = "controller" if component == "test" else component
        expected = f"tls-{owner}" if name == "mtls-existing" else f"{FULLNAME}-tls-{owner}"
        assert volume["secret"]["secretName"] == expected
        assert mounts["tls"] == "/etc/flowfleet/tls"
        if component == "test":
            assert environment(pod)["FLOWFLEET_CA"] == "/etc/flowfleet/tls/ca.crt"
            assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        elif component != "redis":
            assert environment(pod)["FLOWFLEET_TLS_DIR"] == "/etc/flowfleet/tls", workload
            assert environment(pod)["FLOWFLEET_TLS_NAME"] == "flowfleet"
        if component in ("controller", "rollout", "trainer"):
            assert environment(pod)["FLOWFLEET_REDIS_URL"].startswith("rediss://")
    assert "\nport 0\n" in rendered.get("ConfigMap", "redis")["data"]["redis.conf"]
    authentication = rendered.get("TriggerAuthentication", "scaler")
    assert [item["parameter"] for item in authentication["spec"]["secretTargetRef"]] == [
        "caCert",
        "tlsClientCert",
        "tlsClientKey",
    ]
    assert all(
        doc["spec"]["triggers"][0]["authenticationRef"] == {"name": f"{FULLNAME}-scaler"}
        for doc in rendered.kind("ScaledObject")
    )


def test_certificates_are_one_a_component_with_the_names_by_which_it_is_reached() -> None:
    rendered = Rendered("mtls")
    certificates = {doc["metadata"]["name"]: doc["spec"] for doc in rendered.kind("Certificate")}
    components = ("controller", "rollout", "trainer", "reward", "redis", "keda")
    assert certificates.keys() == {f"{FULLNAME}-ca", *(f"{FULLNAME}-tls-{component}" for component in components)}
    for component in components:
        spec = certificates[f"{FULLNAME}-tls-{component}"]
        is_server = component != "keda"
        assert (spec["dnsNames"][:2] == ["flowfleet", f"{component}.flowfleet"]) == is_server
        assert of_certificate([name.encode() for name in spec["dnsNames"]], "flowfleet") == [component] * is_server
        assert is_server or "flowfleet" not in spec["dnsNames"]
        assert ("server auth" in spec["usages"]) == is_server
        assert "client auth" in spec["usages"]
        assert spec["issuerRef"] == {"name": f"{FULLNAME}-ca", "kind": "Issuer", "group": "cert-manager.io"}
    assert f"{FULLNAME}-scaler.ns.svc" in certificates[f"{FULLNAME}-tls-controller"]["dnsNames"]
    assert f"{FULLNAME}-redis" in certificates[f"{FULLNAME}-tls-redis"]["dnsNames"]
    assert f"{FULLNAME}-reward-ocr.ns.svc" in certificates[f"{FULLNAME}-tls-reward"]["dnsNames"]
    assert certificates[f"{FULLNAME}-ca"]["isCA"] is True
    assert {doc["metadata"]["name"] for doc in rendered.kind("Issuer")} == {f"{FULLNAME}-ca", f"{FULLNAME}-self-signed"}


def test_an_issuer_that_is_named_signs_all() -> None:
    rendered = Rendered("everything")
    assert rendered.kind("Issuer") == []
    issuer = {"name": "fleet", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    assert all(doc["spec"]["issuerRef"] == issuer for doc in rendered.kind("Certificate"))
    assert "fleet.example.com" in rendered.get("Certificate", "tls-controller")["spec"]["dnsNames"]


def test_certificates_of_your_own_need_no_cert_manager() -> None:
    rendered = Rendered("mtls-existing")
    assert rendered.kind("Certificate") == rendered.kind("Issuer") == []


# -- what users see --------------------------------------------------------------------------------------------------


def test_an_ingress_leads_to_rest() -> None:
    assert Rendered("nvidia").kind("Ingress") == Rendered("nvidia").kind("HTTPRoute") == []
    (rule,) = Rendered("everything").get("HTTPRoute", "controller")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert rule["backendRefs"] == [{"name": f"{FULLNAME}-controller", "port": 8470}]
    spec = Rendered("everything").get("Ingress", "controller")["spec"]
    (rule,) = spec["rules"]
    assert rule["host"] == "fleet.example.com"
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": f"{FULLNAME}-controller", "port": {"name": "http"}}
    assert spec["tls"] == [{"hosts": ["fleet.example.com"], "secretName": "fleet-example-com"}]


def test_helm_test_runs_the_tiny_job_where_the_profile_has_one() -> None:
    cpu, nvidia = environment(Rendered("cpu").get("Pod", "test")), environment(Rendered("nvidia").get("Pod", "test"))
    assert cpu["JOB"] == "recipes/tiny_ocr.toml"
    assert nvidia["JOB"] == ""
    assert json.loads(nvidia["REWARDS"]) == ["ocr"]
    assert cpu["FLOWFLEET_URL"] == f"http://{FULLNAME}-controller:8470"
    assert environment(Rendered("mtls").get("Pod", "test"))["FLOWFLEET_URL"].startswith("https://")


def test_the_job_of_helm_test_is_valid_and_has_one_step() -> None:
    from flowfleet.job.files import prepare_job

    settings = environment(Rendered("cpu").get("Pod", "test"))
    root = Path(CHART).parents[2]
    job = prepare_job(root / settings["JOB"], json.loads(settings["SET"]), same_machine=False)
    assert job.schedule.steps == 1


@pytest.mark.parametrize("name", ALL)
def test_the_notes_say_what_to_do_next(name: str) -> None:
    done = helm("install", "fleet", str(CHART), "--namespace", "ns", "--dry-run=client", *API_SERVER, *values_of(name))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "FLOWFLEET_URL=" in notes
    assert "FLOWFLEET_API_KEY=" in notes
    assert "flowfleet submit" in notes
    assert ("port-forward" in notes) == (name != "everything")


def test_pairs_of_settings_that_cannot_work_are_told() -> None:
    refused = {
        'accelerator.resource=""': "accelerator.resource",
        "redis.enabled=false": "redis.external.existingSecret",
        'tls={"enabled":true,"certManager":{"enabled":false}}': "tls.existingSecrets.controller",
        "ingress.enabled=true": "ingress.host",
        'pools=[{"name":"a"},{"name":"a"}]': "pools[1] (a)",
        'rewards=[{"name":"a-b","scorer":"ocr"},{"name":"a_b","scorer":"ocr"}]': "rewards[1] (a_b)",
        'rewards=[{"name":"a"}]': "rewards[0] (a): give scorer",
        'pools=[{"name":"a","autoscaling":{"minReplicas":5}}]': "autoscaling.maxReplicas",
        'accelerator={"resource":"","backend":"gloo"}': "pools[0] (default): accelerators=1",
    }
    outside = 'redis={"enabled":false,"external":{"existingSecret":"r"}}'
    refused[outside] = "redis.external.cidr"
    refused['networkPolicy.apiServer.cidrs=["10.0.0.0/8","0.0.0.0/0"]'] = "0.0.0.0/0 lets the controller call every"
    for setting, message in refused.items():
        done = helm("template", "fleet", str(CHART), *API_SERVER, "--set-json", setting)
        assert done.returncode != 0, setting
        assert message in done.stderr, f"{setting}: {done.stderr}"


def test_runbooks_are_absolute_or_left_out() -> None:
    enabled = "monitoring.prometheusRule.enabled=true"
    for rendered, urls in (
        (Rendered("everything"), {"https://git.example.com/flowfleet/docs/operations.md"}),
        (Rendered("nvidia", enabled), set()),
    ):
        rules = [rule for group in rendered.get("PrometheusRule", "")["spec"]["groups"] for rule in group["rules"]]
        told = [rule["annotations"]["runbook_url"] for rule in rules if "runbook_url" in rule.get("annotations", {})]
        assert {url.partition("#")[0] for url in told} == urls


def test_monitoring_is_rendered_where_it_is_switched_on() -> None:
    kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    assert not any(itertools.chain.from_iterable(Rendered("nvidia").kind(kind) for kind in kinds))


def test_the_admission_policy_is_an_option_and_binds_the_controllers_account_in_its_namespace() -> None:
    assert not Rendered().kind("ValidatingAdmissionPolicy")
    rendered = Rendered("everything", "trainer.admissionPolicy.enabled=true")
    (policy,) = rendered.kind("ValidatingAdmissionPolicy")
    (binding,) = rendered.kind("ValidatingAdmissionPolicyBinding")
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert [condition["expression"] for condition in policy["spec"]["matchConditions"]] == [
        f'request.userInfo.username == "system:serviceaccount:ns:{FULLNAME}-controller"'
    ]
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "ns"
    }
    text = " ".join(rule["expression"] for rule in policy["spec"]["validations"])
    pod = rendered.trainer["spec"]["template"]
    assert f'== "{container(pod)["image"]}"' in text
    for volume in pod["spec"]["volumes"]:
        assert f'v.name == "{volume["name"]}"' in text
    for name in environment(pod):
        assert f'"{name}"' in text


def test_what_loads_models_of_the_hub_shares_its_cache_and_token() -> None:
    rewards = 'rewards=[{"name": "ocr", "scorer": "ocr"}, {"name": "clip", "scorer": "clip"}]'
    models = 'hub.models=["Qwen", "black-forest-labs/FLUX.1-dev"]'
    token = 'hub.token.existingSecret="hub"'
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    for volume, settings in (
        ({"emptyDir": {}}, (models, rewards, token)),
        (claim, (models, rewards, token, f"hub.volume={json.dumps(claim)}")),
    ):
        pods = dict(Rendered("nvidia", *settings).pods())
        having = {name for name, pod in pods.items() if "HF_HOME" in str(pod)}
        named = [f"{FULLNAME}-{name}" for name in ("controller", "rollout-default", "reward-clip")]
        assert having == {"trainer", *named}
        for name in having:
            found = environment(pods[name])
            assert found["FLOWFLEET_HUB_MODELS"] == "Qwen,black-forest-labs/FLUX.1-dev"
            assert found["HF_HUB_OFFLINE"] == "0"
            assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
            assert {"name": "hub", "mountPath": found["HF_HOME"]} in container(pods[name])["volumeMounts"]
            assert {"name": "hub", **volume} in pods[name]["spec"]["volumes"]
    assert environment(Rendered("nvidia", models, "hub.download=false").pod("controller"))["HF_HUB_OFFLINE"] == "1"
    assert "FLOWFLEET_HUB_MODELS" not in str(Rendered("nvidia").objects)
