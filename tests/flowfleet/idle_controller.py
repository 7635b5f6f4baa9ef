"""`python -m tests.flowfleet.idle_controller FLAGS`: the real controller with a runner that runs no job."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from services.controller.api.server import Server
from services.controller.app import create_app
from services.controller.settings import ControllerSettings
from services.controller.store.jobs import JobStore
from tests.services.controller.conftest import IdleRunner

T = TypeVar("T")


def in_store(redis_url: str, act: Callable[[JobStore], Awaitable[T]]) -> T:
    """Does something with the job store, as the part that runs jobs would."""
    import asyncio

    from flowfleet.redis.client import connect

    async def main() -> T:
        redis = connect(redis_url)
        try:
            return await act(JobStore(redis))
        finally:
            await redis.aclose()

    return asyncio.run(main())


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
