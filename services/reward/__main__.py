"""`python -m services.reward --scorer ocr`: one scorer as a gRPC service."""

import argparse
import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flowfleet.process.pulse import Pulse, add_pulse_arguments
from flowfleet.process.service import PATIENT_THREADS, rpc_parser, run_service, serving, usable_cpus
from flowfleet.rewards.requests import SERVICE_NAME
from flowfleet.rpc import endpoint as rpc
from services.reward import scorers
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Batched, Direct, Engine
from services.reward.execution.evaluator import Evaluator
from services.reward.execution.pool import MAX_AHEAD, MAX_PROCESSES, ProcessPool, default_processes
from services.reward.metrics import RewardMetrics
from services.reward.scorer import AnyScorer, Scorer
from services.reward.server import RewardServicer
from services.reward.settings import read_settings

_ANSWER_S = 5.0  # for answers to leave after the drain

log = logging.getLogger(__name__)


def main() -> int:
    logging.captureWarnings(True)
    for name, value in PATIENT_THREADS.items():  # read when torch is imported, here or in a process that scores
        os.environ.setdefault(name, value)
    return run_service("reward", _serve, _parser())


def _parser() -> argparse.ArgumentParser:
    parser = rpc_parser("Scores pictures for reinforcement learning.")
    parser.prog = "python -m services.reward"
    parser.add_argument("--scorer", required=True, metavar="NAME", help=f"one of {', '.join(scorers.SCORERS)}")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="TOML, YAML or JSON of the scorer's settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="changes one of the settings"
    )
    parser.add_argument("--max-batch", type=int, default=Limits.max_batch, help="samples in one call and one batch")
    parser.add_argument(
        "--max-wait-ms",
        type=float,
        default=1000 * Limits.max_wait_s,
        help="how long a request waits for others to share its batch, besides those that arrive while one runs (0)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="processes that score, each on one thread, with another that decodes; 1 is the service's own. "
        f"Default for heavy scorers (ocr): half of the usable CPUs, at most {MAX_PROCESSES}; for others: 1",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=usable_cpus(),
        help="CPU threads of the service's own process; of the one process of an isolated scorer (python without "
        f"gradient), up to {MAX_AHEAD} decode",
    )
    add_pulse_arguments(parser)
    parser.add_argument("--drain-s", type=float, default=60.0, help="longest wait for running calls on SIGTERM")
    return parser


async def _serve(options: argparse.Namespace) -> None:
    for flag in ("max_batch", "threads", "processes"):
        if getattr(options, flag) is not None and getattr(options, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: must be at least 1")
    if not 0.0 <= options.max_wait_ms <= 60_000.0:
        raise ValueError(f"--max-wait-ms {options.max_wait_ms}: must be 0 to 60000")
    settings = read_settings(options.settings, options.changes)
    scorer = scorers.make(options.scorer, settings, options.threads)
    metrics = RewardMetrics(scorer.name, scorer.score_range)
    limits = Limits(max_batch=options.max_batch, max_wait_s=options.max_wait_ms / 1000)
    pulse = Pulse(options.hang_s, options.stall_s)
    servicer = RewardServicer(_engine(options, settings, scorer, limits, metrics, pulse), limits, metrics)
    await servicer.start()
    server = rpc.make_server()

    async def drain() -> None:
        try:
            await asyncio.wait_for(servicer.drain(), options.drain_s)
        except TimeoutError:
            log.warning("calls were still running after %.0f s", options.drain_s)

    servicer.add_to_server(server)
    await rpc.serve(
        server,
        **serving(options),
        health=rpc.HealthState(SERVICE_NAME),
        is_stuck=lambda: pulse.is_stuck,
        on_drain=drain,
        grace_s=_ANSWER_S,
    )


def _engine(
    options: argparse.Namespace,
    settings: dict[str, Any],
    scorer: AnyScorer,
    limits: Limits,
    metrics: RewardMetrics,
    pulse: Pulse,
) -> Engine:
    if isinstance(scorer, Scorer):
        return Batched(scorer, _evaluator(options, settings, scorer, metrics, pulse), limits, metrics)
    if options.processes is not None:
        raise ValueError(f"--processes {options.processes}: scorer {scorer.name} asks others and has no use for them")
    log.info("scorer %s %s, calls other servers", scorer.name, scorer.version)
    return Direct(scorer, limits, metrics)


def _evaluator(
    options: argparse.Namespace, settings: dict[str, Any], scorer: Scorer[Any], metrics: RewardMetrics, pulse: Pulse
) -> Evaluator[Any] | ProcessPool:
    num_processes = options.processes or default_processes(scorer.heavy)
    if num_processes == 1 and not scorer.isolated:
        log.info("scorer %s %s, %d threads", scorer.name, scorer.version, options.threads)
        return Evaluator(scorer, options.threads, pulse)
    log.info("scorer %s %s, processes: %d", scorer.name, scorer.version, num_processes)
    make = partial(scorers.make, options.scorer, scorer.pinned or settings, 1)
    limits, groups = scorer.process_limits, scorer.needs_group
    num_threads = options.threads if num_processes == 1 else 1
    return ProcessPool(make, num_processes, metrics, options.log_level, limits, groups, num_threads)


if __name__ == "__main__":
    sys.exit(main())
