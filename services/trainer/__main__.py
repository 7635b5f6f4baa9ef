"""Rank of a trainer: `python -m torch.distributed.run … -m services.trainer`. Rank 0 serves TrainerService; the other
ranks follow it.

On one machine ranks are forked from a process that has imported this module (flowfleet/process/forkserver.py). Without
torchrun there is one rank. Needs FLOWFLEET_REDIS_URL; see `--help` for the flags.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from flowfleet.data.blobs import SyncBlobs, open_blobs_sync
from flowfleet.errors import FlowfleetError
from flowfleet.peers import Peers
from flowfleet.process import telemetry, traces
from flowfleet.process.service import end_soon, end_with_parent, format_address, rpc_parser, run_service, serving
from flowfleet.proto import models_pb2_grpc, trainer_pb2_grpc
from flowfleet.redis import client as redis_client
from flowfleet.rpc import endpoint as rpc
from services.trainer import attach, termination
from services.trainer.checkpoints.fence import Replaced
from services.trainer.commands import Command, Kind
from services.trainer.leaving import leave
from services.trainer.parallel.ranks import Ranks
from services.trainer.publishing.publisher import Publisher
from services.trainer.runner import Runner
from services.trainer.sampling.replica import RankReplica
from services.trainer.server import TrainerService
from services.trainer.step.gradients.client import loop_in_a_thread
from services.trainer.worker import Job, Worker

SERVICE = "flowfleet.v1.TrainerService"
_EVERYWHERE = ("0.0.0.0", "::")
_WATCH_EVERY_S = 1.0
_STOP_S = 3.0  # from the end of rank 0's drain until its word has come

log = logging.getLogger(__name__)


class _Calls(Protocol):
    @property
    def idle_s(self) -> float: ...


def main(argv: Sequence[str] | None = None) -> int:
    end_soon()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    flags = parser()
    options = flags.parse_args(argv)
    if options.controller:
        try:
            joined = attach.join(options.controller)
            flags.set_defaults(host=joined.host, serves=joined.serves)
        except (ValueError, OSError) as error:
            print(f"{flags.prog}: error: {error}", file=sys.stderr)
            return 2
    try:
        if int(os.environ.get("RANK", "0")) > 0:
            with termination.recorded():
                return follow(flags.parse_args(argv))
        return run_service("trainer", lead, flags, argv)
    finally:
        attach.leave()


def parser() -> argparse.ArgumentParser:
    flags = rpc_parser("Trains one job's model and publishes its weights.")
    flags.add_argument("--controller", metavar="URL", help="joins the job of FLOWFLEET_ATTACH_TOKEN there")
    flags.set_defaults(serves=lambda address: None)
    flags.add_argument("--transfer-host", help="address at which replicas reach this rank for weights; default: --host")
    flags.add_argument("--sample-port", type=int, default=0, help="first port of ranks that sample; 0 takes free ones")
    flags.add_argument("--idle-exit-s", type=float, default=900.0, help="ends by itself after so long without a call")
    flags.add_argument("--drain-s", type=float, default=10.0, help="longest wait for a running command on SIGTERM")
    return flags


async def lead(options: argparse.Namespace) -> None:
    """Rank 0: serves until SIGTERM, too long a silence, or a failure that left the ranks in an unknown state."""
    with termination.recorded():
        ranks = Ranks()
    stop, failed, told = asyncio.Event(), asyncio.Event(), asyncio.Event()
    worker = Worker(ranks, _blobs())

    def on_fatal() -> None:
        failed.set()
        stop.set()

    def on_end() -> None:
        told.set()
        stop.set()

    runner = Runner(worker, on_fatal)
    publisher = Publisher(worker, runner, _transfer_host(options))
    replica = _replica(options, worker, asyncio.get_running_loop(), on_fatal)
    service = TrainerService(worker, runner, publisher, telemetry.JobMetrics(), uuid.uuid4().hex, on_end)
    server = rpc.make_server()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server)
    peers, loop = Peers(redis_client.connect(redis_client.redis_url())), asyncio.get_running_loop()
    models_pb2_grpc.add_ModelServiceServicer_to_server(peers, server)

    async def give_models(address: str) -> None:
        peers.address = format_address(_transfer_host(options), int(address.rpartition(":")[2]))
        options.serves(peers.address)

    def configured(job: Job) -> None:
        asyncio.run_coroutine_threadsafe(peers.model(job.spec.model.path), loop).result()
        replica.joins(job)

    worker.on_configured = configured
    watches = [
        asyncio.create_task(stop_when_idle(service, options.idle_exit_s, stop)),
        asyncio.create_task(end_when_replaced(worker, on_fatal)),
    ]
    settled = False

    async def drain() -> None:
        nonlocal settled
        await replica.leave(0.0)
        await peers.close()
        saved = None if told.is_set() else worker.job  # nothing of an ended job is needed any more
        settled = await (runner.settled(0.0) if failed.is_set() else leave(saved, runner, options.drain_s))

    await rpc.serve(
        server,
        **serving(options),
        health=rpc.HealthState(SERVICE),
        on_serving=give_models,
        on_drain=drain,
        stop=stop,
        grace_s=1.0,
    )
    for watch in watches:
        watch.cancel()
    publisher.close()
    if failed.is_set() or not settled:
        _end_at_once(1 if failed.is_set() else 0)
    await runner.stop()
    ranks.close()


def follow(options: argparse.Namespace) -> int:
    """Runs a rank other than 0: executes rank 0's commands until one of them is `STOP`."""
    telemetry.configure_logging(f"trainer-rank{os.environ['RANK']}", options.log_level)
    traces.start("trainer")
    _stop_after_signals(options.drain_s + _STOP_S)
    ranks = Ranks()
    worker = Worker(ranks, _blobs())
    replica = _replica(options, worker, loop_in_a_thread("replica"), lambda: _end_at_once(1))
    while True:
        try:
            command = Command.from_bytes(ranks.broadcast())
        except RuntimeError as error:
            log.error("lost rank 0: %s", error)
            _end_at_once(1)
        if command.kind is Kind.STOP:
            replica.leaves()
            ranks.close()
            traces.stop()
            return 0
        with contextlib.suppress(FlowfleetError):  # all ranks raised it, and rank 0 tells the caller
            worker.execute(command)


async def stop_when_idle(service: _Calls, limit_s: float, stop: asyncio.Event) -> None:
    """Sets `stop` once the service has been idle for `limit_s`."""
    while service.idle_s < limit_s:
        await asyncio.sleep(min(_WATCH_EVERY_S, limit_s))
    log.info("no call for %.0f s; exiting", limit_s)
    stop.set()


async def end_when_replaced(worker: Worker, on_fatal: Callable[[], None]) -> None:
    """Ends a trainer that was given up and wakes when the next one runs."""
    while True:
        await asyncio.sleep(_WATCH_EVERY_S)
        if worker.job is not None:
            try:
                await asyncio.to_thread(worker.job.checkpoints.fence.check)
            except Replaced as error:
                log.error("%s: ends", error)
                on_fatal()
                return


def _replica(
    options: argparse.Namespace, worker: Worker, loop: asyncio.AbstractEventLoop, on_replaced: Callable[[], None]
) -> RankReplica:
    """Makes this rank's replica, which joins the fleet with the first job that samples on it. Its loop also calls
    rewards."""
    worker.loop = loop
    replica = RankReplica(
        worker,
        loop,
        host=options.host,
        reached_at=_transfer_host(options),
        first_port=options.sample_port,
        on_replaced=on_replaced,
    )
    worker.on_configured = replica.joins
    return replica


def _stop_after_signals(limit_s: float) -> None:
    """SIGTERM is rank 0's business while it drains; a pod of its own, which rank 0 knows nothing of, ends after that.

    A thread sees to it: no handler of Python's runs while the main thread waits inside a collective.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def end() -> None:
        os.read(reader, 1)
        time.sleep(limit_s)
        log.error("rank 0 sent no stop within %.0f s of the signal; exiting", limit_s)
        _end_at_once(1)

    threading.Thread(target=end, name="signals", daemon=True).start()


def _blobs() -> SyncBlobs:
    return open_blobs_sync(redis_client.connect_sync(redis_client.redis_url()))


def _transfer_host(options: argparse.Namespace) -> str:
    host: str = options.transfer_host or options.host
    return socket.gethostbyname(socket.gethostname()) if host in _EVERYWHERE else host


def _end_at_once(code: int) -> NoReturn:
    """Ends without the libraries' own cleanup, which can take long or wait for an uninterruptible command; the job
    resumes from its last checkpoint."""
    attach.leave()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
