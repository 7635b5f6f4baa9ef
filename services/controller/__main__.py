"""python -m services.controller: runs jobs and serves the REST API until SIGTERM.

Exit codes: 0 after a drain, 1 on a failure, 2 when the user must change something (said on stderr).
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from flowfleet.process import traces
from flowfleet.process.service import keep_freed_memory
from flowfleet.process.telemetry import configure_logging
from flowfleet.redis.client import connect_sync
from flowfleet.redis.trouble import trouble, unfit
from flowfleet.rpc import tls
from services.controller.api.server import Server
from services.controller.app import create_app
from services.controller.jobs.scheduler import JobScheduler
from services.controller.ports import SchedulerFactory
from services.controller.reading.confinement import hide_memory
from services.controller.settings import ControllerSettings

SWITCH_S = 0.001
"""Time within which a computing thread yields to the event loop."""
COLLECT = 5_000, 10, 200
"""Thresholds of the garbage collector. A full collection stops the event loop for 0.2 s where 65,536 samples are open,
so it comes after ten million new objects, and the modules' objects are left out of it."""


def main(argv: Sequence[str], runner_factory: SchedulerFactory = JobScheduler) -> int:
    try:
        settings = ControllerSettings.from_command_line(argv)
        configure_logging("controller", settings.log_level)
        certificates = tls.from_env()
        check_redis(settings.redis_url.get_secret_value())
        traces.start("controller")
        app = create_app(settings, runner_factory)
    except ValueError as error:
        print(f"services.controller: error: {error}", file=sys.stderr)
        return 2
    except RedisError as error:
        print(f"services.controller: error: {trouble(error) or error}", file=sys.stderr)
        return 1
    sys.setswitchinterval(SWITCH_S)
    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(*COLLECT)
    hide_memory()
    server = Server(app, settings, certificates)
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
        return 1
    finally:
        traces.stop()
    return 0


def check_redis(url: str) -> None:
    """Raises ValueError for a Redis that loses keys or cannot change several at once; RedisError for none."""
    with connect_sync(url) as redis:
        try:
            info: Any = redis.info()
        except ResponseError:  # some services forbid INFO
            return
    if problem := unfit(info):
        raise ValueError(problem)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
