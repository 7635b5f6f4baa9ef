"""How long weights take from an FSDP2 trainer to rollouts on other devices, verified: docs/results.md.

    python -m bench.speed.publish --ranks 1 2 4        full-size Qwen-Image, random weights; a device more than ranks
    python -m bench.speed.publish --receivers 3        one trainer rank and three receivers, on four devices
    python -m bench.speed.publish --self-check --receivers 3    hashes, and a receiver killed in a broadcast
    python -m bench.speed.publish --tiny --ranks 1 2   a tiny one, on the CPU over Gloo where there is no accelerator

Trainer ranks and receivers are processes. Rank 0 publishes through the trainer service's own broadcaster, and receivers
are the rollout service with a transformer alone. Times are medians of `--rounds` after one round that is not counted.
*sender*: rank 0 gathers, hashes and broadcasts. *verified*: from the last receiver's pause until rank 0 knows that each
receiver verified every parameter.

The self-check kills one receiver halfway through its second version. The broadcaster must leave it out by itself and
send the version to the others; a single receiver is replaced by another one on its device. Both times count from the
kill: *sender free*, when the sender waits for the broken group no more, and *verified again*, when the remaining
receivers have verified the version.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.speed.full_size import write_checkpoint
from flowfleet.hardware.accelerators import visible_devices

MODES = ("full", "lora")
TIMEOUT = timedelta(minutes=10)
_POLL_S = 0.1

Process = subprocess.Popen[bytes]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of the trainer; one run each")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="default: the fleet's")
    parser.add_argument("--self-check", action="store_true")
    options = parser.parse_args(arguments)
    require_devices(max(options.ranks) + options.receivers)
    flags = ["--rounds", str(options.rounds)]
    flags += ["--bucket-bytes", str(options.bucket_bytes)] if options.bucket_bytes else []
    with tempfile.TemporaryDirectory() as directory:
        flags += ["--folder", str(write_checkpoint(Path(directory), tiny=options.tiny))]
        (self_check if options.self_check else measure)(options, flags)


def measure(options: argparse.Namespace, flags: list[str]) -> None:
    """Prints a table, row by row."""
    print("| model | trainer ranks | receivers | GB | sender s | verified s | GB/s |\n|---|---|---|---|---|---|---|")
    for mode in options.modes:
        for ranks in options.ranks:
            told = run(ranks, options.receivers, [*flags, "--mode", mode])
            sender, verified = statistics.median(told["sender_s"]), statistics.median(told["verified_s"])
            size = told["bytes"] / 1e9
            cells = [model(mode, options), str(ranks), str(options.receivers), f"{size:.3g}"]
            print(line([*cells, f"{sender:.3f}", f"{verified:.3f}", f"{size / verified:.3g}"]), flush=True)


def self_check(options: argparse.Namespace, flags: list[str]) -> None:
    """Prints what was checked, then a table. Raises CalledProcessError if anything is not as it should be."""
    rows = []
    for mode in options.modes:
        for ranks in options.ranks:
            told = run(ranks, options.receivers, [*flags, "--mode", mode, "--check"])
            print("\n".join(told["checked"]), flush=True)
            cells = [model(mode, options), str(ranks), str(options.receivers), f"{told['bytes'] / 1e9:.3g}"]
            rows.append([*cells, f"{told['free_s']:.2f}", f"{told['again_s']:.2f}"])
    print("| model | trainer ranks | receivers | GB | sender free s | verified again s |\n|---|---|---|---|---|---|")
    print("\n".join(map(line, rows)))


def model(mode: str, options: argparse.Namespace) -> str:
    """Name of a row's model."""
    return f"{'tiny ' if options.tiny else ''}Qwen-Image, {'LoRA r64' if mode == 'lora' else 'full'}"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def require_devices(count: int) -> None:
    """Raises SystemExit where there are accelerators, but not so many."""
    if 0 < (found := len(visible_devices())) < count:
        raise SystemExit(f"a device per trainer rank and receiver: {count} are needed, {found} are visible")


def run(ranks: int, receivers: int, flags: list[str]) -> dict[str, Any]:
    """Runs trainer ranks and receivers to the end and returns what rank 0 reports. Raises CalledProcessError for a
    process that fails."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    flags = [*flags, "--port", str(store.port)]
    trainer = start_trainer(ranks, [*flags, "--receivers", str(receivers)])
    others = [start("receiver", [*flags, "--number", str(n)], ranks + n) for n in range(receivers)]
    victim = others[0] if "--check" in flags else None
    if victim and receivers == 1:
        others.append(start("receiver", [*flags, "--number", "1", "--replaces"], ranks))
    wait_all(trainer, others, victim)
    report: dict[str, Any] = json.loads(store.get("report"))
    return report


def start_trainer(ranks: int, flags: list[str]) -> list[Process]:
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = rendezvous.port
    del rendezvous  # frees the port for rank 0
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [start("trainer", flags, rank, {**group, "RANK": str(rank)}) for rank in range(ranks)]


def start(role: str, flags: list[str], device: int, env: Mapping[str, str] | None = None) -> Process:
    command = [sys.executable, "-m", f"bench.speed.publish.{role}", *flags]
    own = {**os.environ, **(env or {}), "LOCAL_RANK": str(device)}
    return subprocess.Popen(command, env=own, cwd=Path(__file__).parents[3])


def wait_all(trainer: Sequence[Process], receivers: Sequence[Process], victim: Process | None) -> None:
    """Waits until the trainer's ranks have ended and ends the receivers. Raises CalledProcessError for the first of all
    that fails, except the victim, which must be killed."""
    processes = [*trainer, *receivers]
    try:
        while any(rank.poll() is None for rank in trainer):
            for process in processes:
                expected = (None, -signal.SIGKILL) if process is victim else (None, 0)
                if process.poll() not in expected:
                    raise subprocess.CalledProcessError(process.returncode, process.args)
            time.sleep(_POLL_S)
        for rank in trainer:
            if rank.returncode:
                raise subprocess.CalledProcessError(rank.returncode, rank.args)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
