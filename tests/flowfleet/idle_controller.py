"""`python -m tests.flowfleet.idle_controller FLAGS`: the real controller with a runner that runs no job."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from services.controller.api.server import Server
from services.controller.app import create_app
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store
from tests.services.controller.conftest import IdleRunner

T = TypeVar("T")


async def with_store(redis_url: str, act: Callable[[Store], Awaitable[T]]) -> T:
    """Does something with the job store, as the part that runs jobs would."""
    from flowfleet.redis.client import connect

    redis = connect(redis_url)
    try:
        return await act(Store(redis))
    finally:
        await redis.aclose()


def in_store(redis_url: str, act: Callable[[Store], Awaitable[T]]) -> T:
    """Does the same for a test of a synchronous client."""
    import asyncio

    return asyncio.run(with_store(redis_url, act))


def job_settings(directory: Path, **parts: Any) -> dict[str, Any]:
    """A job whose files exist; top-level parts can be replaced."""
    model, prompts = directory / "model", directory / "prompts.txt"
    model.mkdir(exist_ok=True)
    (model / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    prompts.write_text('A red sign that says "K7QX"\n')
    return {"model": {"path": str(model)}, "rewards": {"ocr": {}}, "data": {"train": str(prompts)}, **parts}


if __name__ == "__main__":
    settings = ControllerSettings.from_command_line(sys.argv[1:])
    Server(create_app(settings, IdleRunner), settings).run()
