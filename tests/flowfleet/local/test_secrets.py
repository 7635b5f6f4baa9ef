from __future__ import annotations

import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfleet.api.access import Right
from flowfleet.local import secrets
from flowfleet.local.plan import Plan, StackOptions
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.session import plan_stack
from flowfleet.local.stack import StackError, StateDir
from flowfleet.process import service
from flowfleet.redis import acl as redis_acl
from flowfleet.redis.client import connect_sync
from flowfleet.rpc import kinds
from services.controller.api.keys import Keys

REDIS_URL = "FLOWFLEET_REDIS_URL"
NAMES = (service.API_KEY, REDIS_URL, "FLOWFLEET_RPC_TOKEN", "FLOWFLEET_REWARD_RPC_TOKEN", "FLOWFLEET_TRAINER_RPC_TOKEN")


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    for name in (service.RPC_TOKEN, service.API_KEY):
        monkeypatch.delenv(name, raising=False)
    return plan_stack(StackOptions(state_dir=tmp_path / "state", port=0))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("_umask")
def test_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    for folder in (state.secrets, state.redis):  # of an earlier version, open to all
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    for file in (state.secrets / "controller.env", state.redis / "redis.conf"):
        file.touch()
        file.chmod(0o644)
    plan_stack(StackOptions(state_dir=state.path, port=0))
    assert {_mode(folder) for folder in (state.secrets, state.redis)} == {0o700}
    files = [*state.secrets.iterdir(), *state.redis.iterdir()]
    assert {file.name for file in files} == {"controller.env", "rollout.env", "reward.env", "redis.conf"}
    assert {_mode(file) for file in files} == {0o600}


def test_each_process_has_the_secrets_of_its_kind_alone(planned: Plan, tmp_path: Path) -> None:
    secret = {
        process.name: {process.env[name] for name in NAMES if name in process.env} for process in planned.processes
    }
    assert (secret["redis"], len(secret["rollout-0"]), len(secret["reward-ocr"])) == (set(), 1, 1)
    assert REDIS_URL not in planned.processes[2].env
    assert secret["reward-ocr"] == {planned.processes[-1].env["FLOWFLEET_REWARD_RPC_TOKEN"]}
    assert not secret["rollout-0"] & (secret["controller"] | secret["reward-ocr"])
    for process in planned.processes:
        kind = process.name.partition("-")[0]
        if kind != "redis":
            found = secrets.read(tmp_path / "state" / "secrets", kind)  # type: ignore[arg-type]
            assert found.items() <= process.env.items()
    everything = {value for values in secret.values() for value in values} | {planned.redis_url}
    assert not any(value in word for value in everything for process in planned.processes for word in process.argv)


def test_tokens_open_what_their_kind_may_call(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {process.name: process.env for process in planned.processes}
    trainer = kinds.trainer_environment(env["controller"])
    for server in (env["rollout-0"], trainer):
        monkeypatch.setenv(service.RPC_ACCEPT, server[service.RPC_ACCEPT])
        callers = kinds.callers_from_env()
        assert callers.kind_of(env["controller"][service.RPC_TOKEN]) == "controller"
        assert callers.kind_of(env["controller"][kinds.ROLLOUT_TOKEN]) == "sampler"
        assert callers.kind_of(env["reward-ocr"][service.RPC_TOKEN]) is None
    assert trainer[REDIS_URL].startswith("redis://trainer:")


def test_a_token_of_the_users_goes_to_rewards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.RPC_TOKEN, "of my rewards elsewhere")
    environments = StackSecrets().environments(1)
    holders = [kind for kind, env in environments.items() if "of my rewards elsewhere" in env.values()]
    assert holders == ["controller", "reward"]
    assert environments["controller"][service.RPC_TOKEN] != "of my rewards elsewhere"


def test_every_start_makes_others(tmp_path: Path) -> None:
    made = [StackSecrets() for _ in range(2)]
    words = [
        {*own.redis.values(), own.operator, own.controller, own.trainer, own.reward, own.api_key, own.asking}
        for own in made
    ]
    assert not words[0] & words[1]
    assert len(words[0]) == len(redis_acl.RULES) + 6


def test_the_files_are_for_a_shell_too(tmp_path: Path) -> None:
    secrets.write(tmp_path, {"reward": {"FLOWFLEET_RPC_TOKEN": "it's $HOME", "OTHER": "b c"}})
    assert secrets.read(tmp_path, "reward") == {"FLOWFLEET_RPC_TOKEN": "it's $HOME", "OTHER": "b c"}
    script = f"set -a; . {shlex.quote(str(tmp_path / 'reward.env'))}; printenv FLOWFLEET_RPC_TOKEN"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "it's $HOME\n"


def test_the_rest_api_asks_for_the_users_key_or_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.API_KEY, "a-key-of-the-user")
    planned = plan_stack(StackOptions(state_dir=tmp_path, port=0))
    assert planned.api_key == planned.processes[-1].env[service.API_KEY] == "a-key-of-the-user"
    with pytest.raises(StackError, match="unset it, or leave out --no-key"):
        plan_stack(StackOptions(state_dir=tmp_path, port=0, key=False))
    monkeypatch.delenv(service.API_KEY)
    keyless = plan_stack(StackOptions(state_dir=tmp_path, port=0, key=False))
    assert "every user of this machine" in str(keyless.warning)
    assert not any(service.API_KEY in process.env or "--keys-file" in process.argv for process in keyless.processes)


def test_the_reward_that_asks_for_votes_has_a_key_for_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(service.API_KEY, raising=False)
    planned = plan_stack(StackOptions(state_dir=tmp_path, port=0, rewards=("likes=human", "ocr")))
    given = {process.name: process.env.get(service.API_KEY) for process in planned.processes}
    assert {name for name, key in given.items() if key} == {"reward-likes", "controller"}
    keys = Keys(planned.api_key, tmp_path / "keys.toml")
    rights = {name: keys.holder(key) for name, key in given.items() if key}
    assert {name: holder.may for name, holder in rights.items() if holder} == {
        "reward-likes": Right.ASK,
        "controller": Right.STEER,
    }


def test_redis_serves_the_users_of_a_stack(planned: Plan) -> None:
    process = subprocess.Popen(planned.processes[0].argv, stdout=subprocess.DEVNULL)
    urls = [item.env[REDIS_URL] for item in planned.processes if REDIS_URL in item.env]
    try:
        for url in (planned.redis_url, *urls):
            with connect_sync(url) as client:
                assert client.ping()
        with connect_sync(planned.redis_url) as operator:
            assert {*map(str, operator.acl_users())} == {"default", *redis_acl.RULES}
    finally:
        process.kill()
        process.wait()
