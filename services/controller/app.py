"""The app factory: wires settings, Redis, job store, runner and routes. Nothing lives outside the app that it makes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector

from flowfleet.data.blobs import open_blobs
from flowfleet.redis.client import connect
from services.controller.api import openapi, problems
from services.controller.api.auth import Guard
from services.controller.api.connections import Streams
from services.controller.api.dependencies import Services
from services.controller.api.feed import Feed
from services.controller.api.keys import Keys
from services.controller.api.routes import attach as api_attach
from services.controller.api.routes import history as api_history
from services.controller.api.routes import jobs as api_jobs
from services.controller.api.routes import models as api_models
from services.controller.api.routes import overview as api_overview
from services.controller.api.routes import page as api_page
from services.controller.api.routes import profiles as api_profiles
from services.controller.api.routes import rewards as api_rewards
from services.controller.api.routes import session as api_session
from services.controller.api.routes import sweeps as api_sweeps
from services.controller.api.routes import system as api_system
from services.controller.api.routes import uploads as api_uploads
from services.controller.api.routes import votes as api_votes
from services.controller.api.routes.system import seen_of_fleet
from services.controller.api.sessions import Sessions
from services.controller.concurrency import end
from services.controller.metrics.monitor import count_jobs
from services.controller.platforms.attach.launcher import AttachLauncher
from services.controller.platforms.kubernetes.deletion_cost import keep_deletion_costs
from services.controller.platforms.platform import open_platform
from services.controller.ports import SchedulerFactory
from services.controller.retention.memory import Memory
from services.controller.scaling.keda import Scaler, serve_scaler
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store


def create_app(settings: ControllerSettings, runner_factory: SchedulerFactory) -> FastAPI:
    """An app that runs jobs while its lifespan lasts."""
    keys = Keys(settings.api_key.get_secret_value() if settings.api_key else None, settings.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.services = await _start(settings, keys, runner_factory, stack)
            yield

    app = FastAPI(
        title="Flowfleet controller",
        description="Submits, watches and steers jobs.",
        version="v1",
        lifespan=lifespan,
        docs_url=None,  # both load their scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    jobs = (
        api_jobs,
        api_sweeps,
        api_uploads,
        api_rewards,
        api_votes,
        api_history,
        api_models,
        api_profiles,
        api_attach,
    )
    routers = [room.router for room in (api_session, api_overview, *jobs, api_system, api_page)]
    for router in routers:
        app.include_router(router)
    problems.install(app, [route for router in routers for route in router.routes])
    openapi.install(app)
    app.add_middleware(Guard, keys=keys)
    return app


async def _start(
    settings: ControllerSettings, keys: Keys, runner_factory: SchedulerFactory, stack: AsyncExitStack
) -> Services:
    """Starts what the app serves. The stack stops it in reverse."""
    redis = connect(settings.redis_url.get_secret_value())
    stack.push_async_callback(redis.aclose)
    await redis.ping()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    store = Store(redis)
    platform = open_platform(settings, registry)
    await platform.directory.start()
    stack.push_async_callback(platform.directory.stop)
    launcher = AttachLauncher(platform.launcher, settings.state_dir)
    runner = runner_factory(settings, redis, store, registry, launcher, platform.directory)
    await runner.start()
    stack.push_async_callback(runner.stop)
    counting = asyncio.create_task(count_jobs(store, registry, lambda: runner.leads), name="count jobs")
    stack.push_async_callback(end, [counting])
    if platform.set_deletion_cost is not None:
        costs = asyncio.create_task(keep_deletion_costs(runner, platform.set_deletion_cost), name="deletion costs")
        stack.push_async_callback(end, [costs])
    if settings.scaler_port is not None:
        scaler = Scaler(redis, store, platform.directory)
        await stack.enter_async_context(serve_scaler(scaler, settings.host, settings.scaler_port))
    blobs = open_blobs(redis, settings.blobs, registry)
    sources = settings.sources
    stack.callback(sources.close)
    sessions, closing = Sessions(redis, keys), asyncio.Event()
    feed = Feed(store, sessions, lambda: seen_of_fleet(runner, platform.directory), closing)
    stack.push_async_callback(end, feed.tasks())
    services = Services(
        settings=settings,
        redis=redis,
        store=store,
        blobs=blobs,
        directory=platform.directory,
        runner=runner,
        sources=sources,
        registry=registry,
        memory=Memory(redis, settings.keep),
        streams=Streams(settings.max_streams),
        uploads=settings.uploads,
        keys=keys,
        sessions=sessions,
        feed=feed,
        closing=closing,
        launcher=launcher,
    )
    leaving = asyncio.create_task(_leave(services), name="hand over at once")
    stack.push_async_callback(end, [leaving])
    return services


async def _leave(services: Services) -> None:
    """Another controller leads while this one still answers its last requests."""
    await services.closing.wait()
    await services.runner.stop()
