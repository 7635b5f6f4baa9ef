"""The REST surface is frozen: a change of it shows in openapi.json, on purpose.

python -m tests.services.controller.test_openapi --write
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from services.controller.app import create_app
from services.controller.settings import ControllerSettings
from tests.services.controller.conftest import IdleRunner

SNAPSHOT = Path(__file__).with_name("openapi.json")
COMMAND = "python -m tests.services.controller.test_openapi --write"


def build() -> dict[str, Any]:
    settings = ControllerSettings(redis_url=SecretStr("redis://127.0.0.1:6379/0"))
    return create_app(settings, IdleRunner).openapi()


def render() -> str:
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


def test_the_surface_is_as_published() -> None:
    assert json.loads(SNAPSHOT.read_text(encoding="utf-8")) == build(), f"if this change is meant, run: {COMMAND}"


def test_every_reference_resolves_and_every_error_is_a_problem() -> None:
    page = build()
    text = json.dumps(page)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= page["components"]["schemas"].keys()
    operations = [operation for path in page["paths"].values() for operation in path.values()]
    assert len(operations) > 15
    for operation in operations:
        assert "application/problem+json" in operation["responses"]["default"]["content"]


if __name__ == "__main__" and "--write" in sys.argv:
    SNAPSHOT.write_text(render(), encoding="utf-8")
