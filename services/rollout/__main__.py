"""`python -m services.rollout`: one replica. Needs FLOWFLEET_REDIS_URL; see `--help` for the flags."""

import argparse
import os
import sys

from flowfleet.models.registry import ENGINES
from flowfleet.process.pulse import add_pulse_arguments
from flowfleet.process.service import PATIENT_THREADS, end_soon, rpc_parser, run_service


def main() -> int:
    end_soon()
    return run_service("rollout", _serve, parser())


def preload() -> None:
    """Imports what a replica with the diffusers engine imports, for a process that replicas are forked from."""
    import services.rollout.engines.diffusers
    import services.rollout.process  # noqa: F401


def parser() -> argparse.ArgumentParser:
    flags = rpc_parser("Samples groups of images under a verified policy version, and takes new weights.")
    flags.add_argument("--replica-id", help="name in the fleet; default: its address")
    flags.add_argument("--pool", default="default", help="pool that it belongs to; jobs name theirs (default)")
    flags.add_argument("--advertise", help="host:port at which the fleet reaches it; default: the address it binds")
    flags.add_argument("--engine", choices=ENGINES, default="diffusers")
    flags.add_argument("--attention-backend", default="TORCH_SDPA", help="of the vllm-omni engine on GPUs")
    flags.add_argument("--device", default="auto", help='"auto", "cpu", "cuda:0", …')
    flags.add_argument(
        "--sequence-parallel-size",
        type=_positive,
        default=1,
        help="devices that share every sample, or large weights: --device and those after it (default 1)",
    )
    flags.add_argument("--max-batch", type=_positive, default=256, help="most rows of one forward")
    flags.add_argument(
        "--adapter-slots",
        type=_not_negative,
        help="adapters of jobs on one base that are ready at once, by --engine diffusers (default 16 on CPUs, else 0); "
        "0: it serves one job at a time",
    )
    flags.add_argument("--threads", type=_positive, help="CPU threads of the engine; default: torch's")
    flags.add_argument("--model", help="directory of a diffusers pipeline to load at start")
    flags.add_argument("--dtype", default="bfloat16", help="of --model; jobs name their own")
    flags.add_argument("--model-copies", default="", help="folder for models from live peers; empty (default): none")
    flags.add_argument("--drain-s", type=float, default=600.0, help="longest wait for running work on SIGTERM")
    add_pulse_arguments(flags)
    return flags


async def _serve(options: argparse.Namespace) -> None:
    """Parses the flags before torch is imported: that takes seconds, and its OpenMP reads its settings then."""
    for name, value in PATIENT_THREADS.items():
        os.environ.setdefault(name, value)
    from services.rollout.process import serve

    await serve(options)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    return value


if __name__ == "__main__":
    sys.exit(main())
