"""Keys with rights, sessions of browsers, and the requests that a foreign page may make a browser send."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from flowfleet.redis import keys
from services.controller.api import sessions, throttle
from services.controller.api.keys import Keys
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import Api, serve

KEY, LOOKS, VOTES = "the-operators-own-key", "a-key-that-may-look", "a-key-that-may-vote"
HOST = "http://127.0.0.1:8080"
OURS = {"Origin": HOST}
COOKIE = "flowfleet_session_8080"
NO_JOB = "/v1/jobs/01890000-0000-7000-8000-000000000000"


def listed(*entries: tuple[str, str, str]) -> str:
    lines = [
        f'[{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nmay = "{may}"' for name, key, may in entries
    ]
    return "\n".join(lines)


@pytest.fixture
def with_keys(settings: ControllerSettings, tmp_path: Path) -> ControllerSettings:
    file = tmp_path / "keys.toml"
    file.write_text(listed(("ann", LOOKS, "look"), ("bob", VOTES, "vote")))
    return settings.model_copy(update={"api_key": SecretStr(KEY), "keys_file": file})


async def log_in(api: Api, key: str = KEY, **headers: str) -> Any:
    return await api.client.post("/v1/session", json={"key": key}, headers={**OURS, **headers})


async def test_without_keys_everyone_of_this_machine_steers(api: Api) -> None:
    shown = (await api.client.get("/v1/session")).json()
    assert shown == {"login": False, "name": "", "may": "steer", "expires_at": None}
    assert (await log_in(api)).status_code == 400


async def test_a_session_stands_for_its_key_until_logout(with_keys: ControllerSettings) -> None:
    async with serve(with_keys) as api:
        assert (await api.client.get("/v1/session")).json()["may"] is None
        assert (await api.client.get("/v1/jobs")).status_code == 401
        opened = await log_in(api)
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        assert KEY not in cookie
        shown = (await api.client.get("/v1/session")).json()
        assert (shown["name"], shown["may"]) == ("operator", "steer")
        assert shown["expires_at"] == opened.json()["expires_at"] > "2026"
        assert (await api.client.get("/v1/jobs")).status_code == 200
        token = api.client.cookies[COOKIE]
        assert (await api.client.delete("/v1/session", headers=OURS)).status_code == 204
        assert COOKIE not in api.client.cookies
        api.client.cookies.set(COOKIE, token)  # a stolen one is worth nothing now
        assert (await api.client.get("/v1/jobs")).status_code == 401


async def test_redis_holds_no_token_and_forgets_in_time(with_keys: ControllerSettings) -> None:
    async with serve(with_keys) as api:
        await log_in(api)
        token = api.client.cookies[COOKIE]
        names = [name async for name in api.services.redis.scan_iter("ff-fleet:sessions:*")]
        held = b"".join([name + await api.services.redis.get(name) for name in names])
        assert len(names) == 1
        assert token.encode() not in held
        assert KEY.encode() not in held
        assert sessions.SESSION_S - 5 <= await api.services.redis.ttl(names[0]) <= sessions.SESSION_S
        await api.services.redis.delete(*names)  # as its expiry does
        assert (await api.client.get("/v1/jobs")).status_code == 401


async def test_a_key_has_a_few_sessions_and_the_newest_stay(
    with_keys: ControllerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    async with serve(with_keys) as api:
        tokens = []
        for key in (LOOKS, KEY, KEY, KEY, KEY, KEY):
            await log_in(api, key)
            tokens.append(api.client.cookies[COOKIE])
        names = [name async for name in api.services.redis.scan_iter("ff-fleet:sessions:*")]
        assert len(names) == 4
        alive = [await api.services.sessions.find(token) is not None for token in tokens]
        assert alive == [True, False, False, True, True, True]


async def test_logging_out_and_in_again_ends_no_other_session(
    with_keys: ControllerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    async with serve(with_keys) as api:
        await log_in(api)
        colleague = api.client.cookies[COOKIE]
        for _ in range(4):
            await log_in(api)
            assert (await api.client.delete("/v1/session", headers=OURS)).status_code == 204
        assert (await api.client.delete("/v1/session", headers=OURS)).status_code == 204  # without a session
        assert await api.services.sessions.find(colleague) is not None
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        assert await api.services.redis.llen(keys.logins(digest)) == 1


async def test_controllers_on_two_ports_have_a_cookie_each(with_keys: ControllerSettings) -> None:
    async with serve(with_keys) as api:
        for port in (8080, 8081):
            await log_in(api, Origin=f"http://127.0.0.1:{port}", Host=f"127.0.0.1:{port}")
        assert {cookie.name for cookie in api.client.cookies.jar} == {COOKIE, "flowfleet_session_8081"}
        other = {"Origin": "http://127.0.0.1:8081", "Host": "127.0.0.1:8081"}
        assert (await api.client.delete("/v1/session", headers=other)).status_code == 204
        assert (await api.client.get("/v1/jobs")).status_code == 200


@pytest.mark.parametrize("way", ["header", "login"])
async def test_wrong_keys_are_slowed_down_and_right_ones_are_not(
    with_keys: ControllerSettings, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(throttle, "DELAY_S", 0.3)
    monkeypatch.setattr(throttle, "AT_ONCE", 4)

    async def guess(key: str) -> int:
        if way == "login":
            return int((await log_in(api, key)).status_code)
        return int((await api.client.get("/v1/jobs", headers={"X-API-Key": key})).status_code)

    async with serve(with_keys) as api:
        assert {await guess(f"a-wrong-key-{number}") for number in range(throttle.FREE)} == {401}
        began = time.monotonic()
        assert await guess("a-wrong-key") == 429
        assert time.monotonic() - began >= 0.3
        assert await guess(KEY) == 200
        waiting = [asyncio.create_task(guess(f"many-at-once-{number}")) for number in range(4)]
        await asyncio.sleep(0.1)
        assert await guess(KEY) == 200  # behind a proxy all callers have one address
        began = time.monotonic()
        assert await guess("one-too-many") == 429
        assert time.monotonic() - began < 0.15
        assert await asyncio.gather(*waiting) == [429] * 4
        assert await guess(KEY) == 200
        monkeypatch.setattr(throttle, "PERIOD_S", 0.0)
        assert await guess("a-wrong-key") == 401


async def test_a_wrong_key_opens_nothing(with_keys: ControllerSettings) -> None:
    async with serve(with_keys) as api:
        for key in ("", KEY[:-1], KEY.upper(), "ключ"):
            answer = await log_in(api, key)
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
        assert (await api.client.post("/v1/session", json={"key": 3}, headers=OURS)).status_code == 400
        api.client.cookies.set(COOKIE, "x" * 4000)
        assert (await api.client.get("/v1/jobs")).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": HOST}, 404),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://renamed.example"}, 404),
        ({}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:3000"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": HOST}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": HOST}, 403),
    ],
)
async def test_a_cookie_steers_from_our_own_page_alone(
    with_keys: ControllerSettings, headers: dict[str, str], status: int
) -> None:
    async with serve(with_keys) as api:
        await log_in(api)
        answer = await api.client.post(f"{NO_JOB}/cancel", headers=headers)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"


async def test_no_other_page_logs_a_browser_in_or_out(with_keys: ControllerSettings) -> None:
    async with serve(with_keys) as api:
        for origin in ("https://evil.example", "null"):
            assert (await log_in(api, Origin=origin)).status_code == 403
        await log_in(api)
        assert (await api.client.delete("/v1/session", headers={"Origin": "https://evil.example"})).status_code == 403
        assert (await api.client.get("/v1/jobs")).status_code == 200


async def test_where_the_page_came_by_https_so_does_the_cookie(with_keys: ControllerSettings) -> None:
    async with serve(with_keys) as api:
        headers = {"Origin": "https://fleet.example", "Host": "fleet.example"}
        opened = await api.client.post("/v1/session", json={"key": KEY}, headers=headers)
        assert "Secure" in opened.headers["set-cookie"].split("; ")


@pytest.mark.parametrize(
    ("key", "look", "vote", "steer"), [(LOOKS, 200, 403, 403), (VOTES, 200, 404, 403), (KEY, 200, 404, 404)]
)
async def test_a_key_may_what_the_file_says(
    with_keys: ControllerSettings, key: str, look: int, vote: int, steer: int
) -> None:
    """Header and session give the same rights; 404: let in, and there is no such job or call."""
    async with serve(with_keys) as api:
        for headers in ({"X-API-Key": key}, OURS):
            assert (await api.client.get("/v1/jobs", headers=headers)).status_code == look
            assert (await api.client.post(f"{NO_JOB}/votes", headers=headers)).status_code == vote
            refused = await api.client.post(f"{NO_JOB}/pause", headers=headers)
            assert refused.status_code == steer
            assert steer != 403 or "this needs a key that may steer" in refused.json()["detail"]
            await log_in(api, key)


async def test_sessions_outlive_a_controller_and_die_with_their_key(with_keys: ControllerSettings) -> None:
    assert with_keys.keys_file is not None
    async with serve(with_keys) as first:
        await log_in(first, VOTES)
        token = first.client.cookies[COOKIE]
        async with serve(with_keys) as second:  # on the same Redis
            second.client.cookies.set(COOKIE, token)
            assert (await second.client.get("/v1/session")).json()["name"] == "bob"
            with_keys.keys_file.write_text(listed(("ann", LOOKS, "look")))
            assert (await second.client.get("/v1/jobs")).status_code == 401
            assert (await second.client.get("/v1/jobs", headers={"X-API-Key": VOTES})).status_code == 401
            assert (await second.client.get("/v1/jobs", headers={"X-API-Key": LOOKS})).status_code == 200


def test_a_keys_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    with pytest.raises(ValueError, match="cannot be read"):
        Keys(None, file)
    good = listed(("ann", LOOKS, "look"))
    for text, message in (
        (good.replace('"look"', '"rule"'), "ann: may is one of look, vote, ask, steer"),
        (good.replace('sha256 = "', 'sha256 = "x'), "ann: give sha256"),
        (good.replace("ann", "operator"), "cannot name a key"),
        (good + "\n" + listed(("bob", LOOKS, "vote")), "bob and ann have the same key"),
        ("ann = 1", "ann: give sha256"),
        (good + "\nkey = 1", "alone"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            Keys(None, file)
    file.write_text(good)
    keys = Keys(None, file)
    assert (holder := keys.holder(LOOKS)) is not None
    assert (holder.name, holder.may) == ("ann", "look")
    file.write_text("not TOML, and longer")
    assert keys.holder(LOOKS) == holder  # as it was
    file.unlink()
    assert keys.holder(LOOKS) is None
