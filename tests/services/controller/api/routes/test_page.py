"""The page is served to everyone, with a policy that lets no foreign script in; its files are kept by their digest."""

from __future__ import annotations

from pydantic import SecretStr

from services.controller.api.routes import page
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import Api, serve


async def test_the_page_and_its_files_are_open_and_guarded(settings: ControllerSettings) -> None:
    for key in (None, SecretStr("a-key-of-some-length")):
        async with serve(settings.model_copy(update={"api_key": key})) as api:
            shown = await api.client.get("/")
            assert shown.status_code == 200
            assert shown.headers["content-type"] == "text/html; charset=utf-8"
            policy = shown.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert (shown.headers["x-content-type-options"], shown.headers["cache-control"]) == ("nosniff", "no-cache")


async def test_files_are_named_by_their_digest(api: Api) -> None:
    digest = page.page_files().digest
    text = (await api.client.get("/")).text
    assert f'"/page/{digest}/css/base.css"' in text
    for place, caching in (
        (f"/page/{digest}/css/base.css", page.FOREVER),
        ("/page/0123456789abcdef/css/base.css", page.AGAIN),  # another release's
        ("/page/css/base.css", page.AGAIN),
    ):
        answer = await api.client.get(place)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, caching)
        assert answer.headers["content-type"] == "text/css; charset=utf-8"
        again = await api.client.get(place, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for missing in (
        "/page/none.js",
        f"/page/{digest}/",
        "/page/../settings.py",
        "/page/%2e%2e/__init__.py",
        "/page/index.html",
    ):
        assert (await api.client.get(missing)).status_code == 404


async def test_without_a_key_the_page_is_for_this_machine(api: Api) -> None:
    assert (await api.client.get("/", headers={"Host": "evil.example"})).status_code == 403
