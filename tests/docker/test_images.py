"""What the Dockerfiles, the build context and the compose file promise, read from their text; nothing is built here."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from redis.exceptions import NoPermissionError

from flowfleet.local.ports import free_ports
from flowfleet.local.secrets import StackSecrets
from flowfleet.redis import acl as redis_acl
from flowfleet.redis.client import connect_sync
from flowfleet.redis.server import find_redis_server, server_url
from flowfleet.rpc.kinds import Kind

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = [
    *sorted(DOCKER.glob("*.Dockerfile")),
    ROOT / "tests/cluster/redis.Dockerfile",
    ROOT / "examples/reward-node/Dockerfile",
]
SERVICES = ("controller", "rollout", "trainer", "reward")
IMAGES = {**{name: name for name in SERVICES}, "reward-models": "reward"}
"""Each with the service that it runs."""
USER = "10001:10001"
KINDS_OF_SERVICES: dict[str, Kind] = {"controller": "controller", "rollout": "rollout", "reward-ocr": "reward"}
"""Services of compose.yaml that call or are called."""


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, its arguments) in order, without comments, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    words = [line.partition(" ") for line in whole.splitlines() if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in words]


def last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    return found[max(at for at, (word, _) in enumerate(found) if word == "FROM") :]


def test_every_service_has_a_dockerfile() -> None:
    assert {f"{name}.Dockerfile" for name in IMAGES} <= {path.name for path in DOCKERFILES}


def test_the_base_is_an_argument_with_a_pinned_default(dockerfile: Path) -> None:
    (word, argument), (_, first) = instructions(dockerfile)[:2]
    name, _, default = argument.partition("=")
    assert word == "ARG"
    assert first.split()[0] == f"${{{name}}}"
    assert re.search(r":\d", default), f"{default} names no version"
    stages = {rest.split()[-1] for word, rest in instructions(dockerfile) if word == "FROM"}
    assert all(
        rest.split()[0] in {f"${{{name}}}", *stages} for word, rest in instructions(dockerfile) if word == "FROM"
    )


@pytest.mark.parametrize("name", IMAGES)
def test_our_base_is_one_digest_with_the_python_that_gpus_have_run(name: str) -> None:
    bases = {instructions(DOCKER / f"{other}.Dockerfile")[0] for other in (name, "controller")}
    assert len(bases) == 1
    assert re.fullmatch(r"BASE=python:3\.12-slim-bookworm@sha256:[0-9a-f]{64}", bases.pop()[1])


def test_images_for_gpus_compile_kernels_and_load_verbs() -> None:
    for name in ("rollout", "trainer", "reward-models"):
        assert ("ARG", 'PACKAGES="g++ ibverbs-providers libibverbs1 librdmacm1"') in instructions(
            DOCKER / f"{name}.Dockerfile"
        )


def test_it_runs_as_one_user_without_rights_and_gets_signals(dockerfile: Path) -> None:
    """An entry point in exec form is process 1 itself; a shell there would keep SIGTERM from it."""
    last = dict(last_stage(dockerfile))
    assert last["USER"] == USER
    assert last["ENTRYPOINT"].startswith('["')


def test_nothing_floats_and_nothing_is_secret(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "latest" not in text
    declared = [rest for word, rest in instructions(dockerfile) if word in ("ARG", "ENV")]
    assert not [rest for rest in declared if re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", rest, re.IGNORECASE)]
    installs = [
        rest for word, rest in instructions(dockerfile) if word == "RUN" and re.search(r"\binstall --quiet", rest)
    ]
    assert all("id=pip,target=/etc/pip.conf" in rest for rest in installs)


@pytest.mark.parametrize(("name", "service"), IMAGES.items())
def test_dependencies_come_before_code_and_only_from_the_project(name: str, service: str) -> None:
    found = instructions(DOCKER / f"{name}.Dockerfile")
    installed = max(at for at, (word, rest) in enumerate(found) if word == "RUN")
    copied = {rest: at for at, (word, rest) in enumerate(found) if word == "COPY"}
    assert copied[f"services/{service} services/{service}"] > installed
    assert copied["flowfleet flowfleet"] > installed
    pins = [rest for word, rest in found if word == "RUN" and re.search(r"[a-z]==\d", rest)]
    assert not pins
    own = {service, "rollout"} if service == "trainer" else {service}  # a rank may sample
    assert not [other for other in set(SERVICES) - own if f"services/{other}" in " ".join(copied)]


def test_rollout_and_trainer_share_their_large_layers() -> None:
    def shared(name: str) -> list[tuple[str, str]]:
        found = instructions(DOCKER / f"{name}.Dockerfile")
        return found[: [rest for _, rest in found].index("packages AS engine" if name == "rollout" else "packages")]

    assert shared("rollout") == shared("trainer")
    assert len(shared("rollout")) > 8


def test_rewards_with_models_share_torch_with_the_rollout() -> None:
    def torch(name: str) -> list[tuple[str, str]]:
        found = instructions(DOCKER / f"{name}.Dockerfile")
        return found[: [rest for _, rest in found].index("torch AS packages")]

    assert torch("reward-models") == torch("rollout")


def test_a_scorer_with_a_library_is_built_with_what_its_description_says(tmp_path: Path) -> None:
    """A builder that only notes its arguments stands in for buildah."""
    engine = tmp_path / "buildah"
    engine.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{tmp_path}/told\n[ "$1" != build ]\n')
    engine.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    subprocess.run(["docker/build", "reward-hpsv3"], cwd=ROOT, env=environment, capture_output=True)
    told = (tmp_path / "told").read_text().splitlines()
    assert {"IMAGE=reward-hpsv3", "WITHOUT=deepspeed|opencv-python", "ABOUT=HPSv3"} <= set(told)
    assert told[told.index("--file") + 1] == "docker/reward-models.Dockerfile"
    dockerfile = instructions(DOCKER / "reward-models.Dockerfile")
    declared = {rest.partition("=")[0] for word, rest in dockerfile if word == "ARG"}
    assert set(re.findall(r"^([A-Z]+)=", "\n".join(told), re.MULTILINE)) - {"TRAINER"} <= declared


@pytest.mark.parametrize(("name", "pinned"), {**{name: name for name in IMAGES}, "trainer": "rollout"}.items())
def test_an_image_holds_what_is_pinned_for_it(name: str, pinned: str) -> None:
    """tests/test_requirements.py holds the pins to the extras."""
    found = instructions(DOCKER / f"{name}.Dockerfile")
    if ("ARG", f"IMAGE={name}") in found:  # a scorer with a library has another
        pinned = "${IMAGE}"
    assert any(word == "COPY" and f"requirements/images/{pinned}.txt" in rest for word, rest in found)
    assert any(word == "RUN" and f"--require-hashes --requirement {pinned}.txt" in rest for word, rest in found)


@pytest.mark.parametrize("name", ["controller", "reward"])
def test_controller_and_rewards_have_no_torch(name: str) -> None:
    assert not re.search(
        r"\b(torch|diffusers|transformers)\b", " ".join(rest for _, rest in instructions(DOCKER / f"{name}.Dockerfile"))
    )


def test_torch_is_what_make_installs() -> None:
    (pin,) = re.findall(r"^TORCH\s*\?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in ("rollout", "trainer", "reward-models"):
        assert ("ARG", f"TORCH={pin}") in instructions(DOCKER / f"{name}.Dockerfile")


def _in_context(path: PurePosixPath) -> bool:
    """Follows .dockerignore: the last pattern that matches the path or a folder above it decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        forms = [pattern, pattern.removeprefix("**/")]
        if any(fnmatch.fnmatch(str(part), form) for part in (path, *path.parents[:-1]) for form in forms):
            kept = line.startswith("!")
    return kept


def test_the_context_holds_what_images_need_and_no_more() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kept = [name for name in listed if _in_context(PurePosixPath(name))]
    assert {name.partition("/")[0] for name in kept} == {
        "pyproject.toml",
        "LICENSE",
        "NOTICE",
        "requirements",
        "flowfleet",
        "services",
        "recipes",
    }
    assert {"recipes/tiny_ocr.toml", "recipes/tiny/model/model_index.json", "recipes/tiny/prompts/train.txt"} <= set(
        kept
    )
    assert "services/reward/judge/rubrics/alignment.toml" in kept
    for name in (
        "recipes/tiny/training.py",
        ".git/config",
        "docker/.env",
        ".venv/bin/python",
        "runs/demo/summary.json",
    ):
        assert not _in_context(PurePosixPath(name)), name
    assert not _in_context(PurePosixPath("flowfleet/__pycache__/jobs.cpython-311.pyc"))
    assert sum((ROOT / name).stat().st_size for name in kept if (ROOT / name).exists()) < 32 * 2**20


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def test_compose_runs_images_that_are_built_here_or_pinned(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"redis", "controller", "rollout", "reward-ocr"}
    for service in compose["services"].values():
        own = re.fullmatch(r"\$\{PREFIX:-\}flowfleet-(\w+):\$\{TAG:-(.+)\}", service["image"])
        if own:
            assert (DOCKER / f"{own[1]}.Dockerfile").exists()
            assert f'version = "{own[2]}"' in (ROOT / "pyproject.toml").read_text()
        else:
            assert re.fullmatch(r"redis:\d+\.\d+\.\d+-\w+", service["image"])


def test_compose_has_no_default_secret(compose: dict[str, Any]) -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for name in ("REDIS_PASSWORD", "FLOWFLEET_RPC_TOKEN", "FLOWFLEET_API_KEY"):
        assert f"${{{name}:?" in text
        assert f"${{{name}:-" not in text


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """What docker/secrets writes, whatever the umask."""
    shutil.copy2(DOCKER / "secrets", tmp_path)
    run = ["sh", "-c", "umask 000; exec ./secrets"]
    subprocess.run(run, cwd=tmp_path, check=True)
    assert [(file.name, file.stat().st_mode & 0o777) for file in tmp_path.glob(".env*")] == [(".env", 0o600)]
    return _env_of(tmp_path)


def _env_of(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    "missing", [(), ("REDIS_PASSWORD",), ("TRAINER_RPC_TOKEN",), ("RPC_ACCEPT",), ("FLOWFLEET_API_KEY", "RPC_ACCEPT")]
)
def test_secrets_adds_what_is_missing(
    secrets: dict[str, str], tmp_path: Path, missing: tuple[str, ...], end: str
) -> None:
    """Settings of compose.yaml and secrets of the operator's own stay."""
    own = {"MODELS": "/data/my models", "TAG": "1", "REDIS_MAXMEMORY": "64gb", "SAMPLER_RPC_TOKEN": '"my own"'}
    accept = {"sampler": hashlib.sha256(b"my own").hexdigest()}
    kept = {name: value for name, value in (secrets | own).items() if name not in missing}
    text = "\n".join([*(f"{name}={value}" for name, value in kept.items()), *(f"{name}=" for name in missing[:1])])
    (tmp_path / ".env").write_text(text + end)
    (tmp_path / ".env").chmod(0o644)
    subprocess.run(["./secrets"], cwd=tmp_path, check=True)
    found = _env_of(tmp_path)
    lines = (tmp_path / ".env").read_text().splitlines()
    assert len(lines) == len(found) == len(secrets | own)
    assert all(found.values())
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    renewed = {*missing, "RPC_ACCEPT"} if "TRAINER_RPC_TOKEN" in missing else set(missing)
    assert {name for name, value in found.items() if (secrets | own)[name] != value} == renewed
    if "RPC_ACCEPT" in renewed:
        for kind, name in (("controller", "FLOWFLEET_RPC_TOKEN"), ("trainer", "TRAINER_RPC_TOKEN")):
            accept[kind] = hashlib.sha256(found[name].encode()).hexdigest()
        assert dict(part.split("=") for part in found["RPC_ACCEPT"].split(",")) == accept


def test_compose_separates_kinds_of_services_as_up_does(compose: dict[str, Any], secrets: dict[str, str]) -> None:
    given = {
        name: {key: re.sub(r"\$\{(\w+)[^}]*\}", lambda word: secrets[word[1]], value) for key, value in own.items()}
        for name, service in compose["services"].items()
        if (own := {key: value for key, value in service["environment"].items() if key.startswith("FLOWFLEET_")})
    }
    assert len({*secrets.values()}) == len(secrets)
    expected = StackSecrets(
        redis={kind: secrets[f"REDIS_{kind.upper()}_PASSWORD"] for kind in redis_acl.RULES},
        controller=secrets["FLOWFLEET_RPC_TOKEN"],
        trainer=secrets["TRAINER_RPC_TOKEN"],
        sampler=secrets["SAMPLER_RPC_TOKEN"],
        reward=secrets["REWARD_RPC_TOKEN"],
        api_key=secrets["FLOWFLEET_API_KEY"],
    ).environments(6379)
    assert given == {name: expected[kind] for name, kind in KINDS_OF_SERVICES.items()}


def test_composes_redis_serves_the_users_of_each_kind(
    compose: dict[str, Any], secrets: dict[str, str], tmp_path: Path
) -> None:
    redis, (port,) = compose["services"]["redis"], free_ports(1)
    script = redis["command"][2].replace("$$", "$").replace("${REDIS_MAXMEMORY:-8gb}", "64mb")
    assert (DOCKER / redis["volumes"][1].partition(":")[0]).is_file()
    users = tmp_path / "users"  # for the server of this machine, which may be of Redis 6
    users.write_text("".join(f"{kind} {redis_acl.user_rules(kind, selectors=False)}\n" for kind in redis_acl.RULES))
    script = script.replace("dir /data", f"dir {tmp_path}\nport {port}").replace("</users", f"<{users}")
    names = {key: value.removeprefix("${").split(":")[0].rstrip("}") for key, value in redis["environment"].items()}
    path = f"{find_redis_server().parent}:/usr/bin:/bin"
    env = {"PATH": path, **{key: secrets[name] for key, name in names.items()}}
    process = subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.DEVNULL)
    try:
        for kind in redis_acl.RULES:
            with connect_sync(server_url(port, secrets[f"REDIS_{kind.upper()}_PASSWORD"], kind)) as client:
                assert client.ping()
                with pytest.raises(NoPermissionError):
                    client.config_get("maxmemory")
    finally:
        process.kill()
        process.wait()


def test_compose_gives_redis_its_password_by_stdin_and_a_limit(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    assert redis["command"][:2] == ["sh", "-c"]
    assert "${REDIS_PASSWORD}" not in " ".join(redis["command"])
    lines = redis["command"][2].splitlines()
    assert lines[0] == "exec redis-server - <<END"
    assert "requirepass $$REDISCLI_AUTH" in lines
    assert "maxmemory ${REDIS_MAXMEMORY:-8gb}" in lines


def test_compose_is_closed_to_other_machines_and_confined(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert "ports" not in service
        assert "0.0.0.0" not in " ".join(service["command"])
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert "healthcheck" in service


def test_the_build_script_refuses_what_it_cannot_build() -> None:
    for environment, argument, told in (
        ("DEVICE=tpu", "rollout", "use cuda, cpu or ascend"),
        ("DEVICE=ascend", "rollout", "set BASE"),
        ("DEVICE=cpu", "nothing", 'no image "nothing"'),
    ):
        command = ["env", environment, *shlex.split("PATH=/usr/bin:/bin docker/build"), argument]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert told in done.stderr
