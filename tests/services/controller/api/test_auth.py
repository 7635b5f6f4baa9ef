"""Who is let in."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import Api, serve

KEY = "a-key-of-some-length"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"X-API-Key": "a-key-of-some-lengtH"}, 401),
        ({"X-API-Key": "ключ"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"X-API-Key": KEY}, 200),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer {KEY}", "Host": "flowfleet.example"}, 200),
    ],
)
async def test_the_key(settings: ControllerSettings, headers: dict[str, str], status: int) -> None:
    encoded = {name.encode(): value.encode() for name, value in headers.items()}
    async with serve(settings.model_copy(update={"api_key": SecretStr(KEY)})) as api:
        response = await api.client.get("/v1/jobs", headers=encoded)
        assert response.status_code == status
        if status == 401:
            assert response.headers["content-type"] == "application/problem+json"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "`flowfleet up` keeps it in secrets/ of its state directory" in response.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/fleet", "/v1/version", "/metrics", "/openapi.json", "/nothing"])
async def test_all_but_health_needs_the_key(settings: ControllerSettings, path: str) -> None:
    async with serve(settings.model_copy(update={"api_key": SecretStr(KEY)})) as api:
        assert (await api.client.get(path)).status_code == 401
        assert [(await api.client.get(probe)).status_code for probe in ("/healthz", "/readyz")] == [200, 200]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:3000"}, 200),
        ({"Host": "evil.example:8080"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "127.0.0.1:8080", "Origin": "https://evil.example"}, 403),
        ({"Host": "127.0.0.1:8080", "Origin": "null"}, 403),
    ],
)
async def test_without_a_key_other_hosts_and_origins_are_refused(
    api: Api, headers: dict[str, str], status: int
) -> None:
    assert (await api.client.get("/v1/jobs", headers=headers)).status_code == status


def test_beyond_loopback_a_key_is_required() -> None:
    url = SecretStr("redis://:p@127.0.0.1:1/0")
    for host in ("0.0.0.0", "::", "10.0.0.1", "controller.example"):
        with pytest.raises(ValidationError, match="set FLOWFLEET_API_KEY"):
            ControllerSettings(redis_url=url, host=host)
        ControllerSettings(redis_url=url, host=host, api_key=SecretStr(KEY))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ControllerSettings(redis_url=url, host=host).local
    with pytest.raises(ValidationError, match="at least 16"):
        ControllerSettings(redis_url=url, api_key=SecretStr("short"))


def test_command_line() -> None:
    env = {"FLOWFLEET_REDIS_URL": "redis://:secret@127.0.0.1:1/0", "FLOWFLEET_API_KEY": KEY}
    argv = ["--port", "0", "--reward", "ocr=127.0.0.1:7001", "--reward", "jpeg=[::1]:7002", "--state-dir", "s"]
    argv += ["--trainer-devices", "2,3"]
    settings = ControllerSettings.from_command_line(argv, env)
    assert (settings.port, settings.rewards) == (0, {"ocr": "127.0.0.1:7001", "jpeg": "[::1]:7002"})
    assert settings.trainer_devices == ("2", "3")
    assert "secret" not in repr(settings)
    assert KEY not in repr(settings)


def test_a_redis_behind_sentinels_is_taken_and_its_acknowledgments_are_a_flag() -> None:
    url = "rediss+sentinel://controller:secret@a,b,c/flowfleet/0"
    settings = ControllerSettings.from_command_line(["--redis-acks", "2"], {"FLOWFLEET_REDIS_URL": url})
    assert (settings.redis_url.get_secret_value(), settings.redis_acks) == (url, 2)
    assert ControllerSettings.from_command_line([], {"FLOWFLEET_REDIS_URL": url}).redis_acks == 0


ON_KUBERNETES = ("--kubernetes", "f", "--owner", "c", "--trainer-template", "trainer.yaml")


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        ([], {}, "set FLOWFLEET_REDIS_URL"),
        ([], {"FLOWFLEET_REDIS_URL": "http://x"}, "set FLOWFLEET_REDIS_URL"),
        (["--redis-acks", "-1"], {"FLOWFLEET_REDIS_URL": "redis://x"}, "--redis-acks: Input should be greater"),
        (["--reward", "ocr"], {"FLOWFLEET_REDIS_URL": "redis://x"}, "give NAME=HOST:PORT"),
        (["--trainer-devices", "0,0"], {"FLOWFLEET_REDIS_URL": "redis://x"}, "--trainer-devices 0,0: give each once"),
        (
            ["--reward", "a=h:1", "--reward", "a=h:2"],
            {"FLOWFLEET_REDIS_URL": "redis://x"},
            "--reward: give each name once, not twice: a",
        ),
        (["--owner", "c"], {"FLOWFLEET_REDIS_URL": "redis://x"}, "--owner is for trainers on Kubernetes"),
        (["--kubernetes", "f", "--owner", "c"], {"FLOWFLEET_REDIS_URL": "redis://x"}, "needs --trainer-template"),
        ([*ON_KUBERNETES], {"FLOWFLEET_REDIS_URL": "redis://x"}, "needs POD_NAMESPACE"),
        (
            [*ON_KUBERNETES, "--reward", "a=h:1"],
            {"FLOWFLEET_REDIS_URL": "redis://x", "POD_NAMESPACE": "n"},
            "--reward is for one machine: with --kubernetes remove it",
        ),
        (
            [*ON_KUBERNETES],
            {"FLOWFLEET_REDIS_URL": "redis://x", "POD_NAMESPACE": "n"},
            "--trainer-template trainer.yaml cannot be read: No such file",
        ),
    ],
)
def test_a_wrong_command_line_says_what_to_change(argv: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ControllerSettings.from_command_line(argv, env)
