"""How long weights take from an FSDP2 trainer to a rollout on another device, verified: docs/results.md.

    python -m bench.speed.publish --ranks 1 2 4        full-size Qwen-Image, random weights; a device more than ranks
    python -m bench.speed.publish --self-check         hashes of device and CPU, and a receiver killed in a broadcast
    python -m bench.speed.publish --tiny --ranks 1 2   a tiny one, on the CPU over Gloo where there is no accelerator

Trainer ranks and receivers are processes, as in the fleet, and use its gather, transfer group, hashes and verification.
What the services add around them, a few gRPC calls, is in the figures of the whole loop. Times are medians of
`--rounds` after one round that is not counted. *sender*: rank 0 gathers, hashes and broadcasts. *verified*: from the
word that the receiver stands still, until rank 0 knows that it verified every parameter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flowfleet.hardware.accelerators import visible_devices

MODES = ("full", "lora")
TIMEOUT = timedelta(minutes=10)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of the trainer; one run each")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--backend", default="", help="of the transfer; default: the devices' own")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="default: the fleet's")
    parser.add_argument("--self-check", action="store_true")
    options = parser.parse_args(arguments)
    flags = ["--rounds", str(options.rounds), "--backend", options.backend]
    flags += ["--tiny"] if options.tiny else []
    flags += ["--bucket-bytes", str(options.bucket_bytes)] if options.bucket_bytes else []
    if options.self_check:
        print(self_check(flags))
        return
    print("| model | trainer ranks | GB | sender s | verified s | GB/s |\n|---|---|---|---|---|---|")
    for mode in options.modes:
        for ranks in options.ranks:
            print(row(mode, ranks, flags), flush=True)


def row(mode: str, ranks: int, flags: list[str]) -> str:
    """One line of the table."""
    store = control_store()
    flags = [*flags, "--mode", mode]
    processes = [*start_trainer(store, ranks, flags), start_receiver(store, 1, place(ranks, 1), flags)]
    wait_all(processes)
    size, *times = map(float, store.get("result").decode().split())
    sender, verified = statistics.median(times[0::2]), statistics.median(times[1::2])
    model = f"{'tiny ' if '--tiny' in flags else ''}Qwen-Image, {'LoRA r64' if mode == 'lora' else 'full'}"
    return f"| {model} | {ranks} | {size / 1e9:.3g} | {sender:.3f} | {verified:.3f} | {size / 1e9 / verified:.3g} |"


def self_check(flags: list[str]) -> str:
    """Hashes, then a receiver that is killed in a broadcast. Raises CalledProcessError if anything is not as it should.

    With three devices the survivor is a member of the broken group, else it comes after it.
    """
    store = control_store()
    num_devices = len(visible_devices())
    together = num_devices == 0 or num_devices > 2
    flags = [*flags, "--check", "together" if together else "later"]
    trainer = start_trainer(store, 1, flags)
    victim = start_receiver(store, 1, place(1, 1), [*flags, "--die"])
    survivor = start_receiver(store, 2, place(1, 2), flags) if together else None
    victim.wait(TIMEOUT.total_seconds())
    store.set("dead", "1")  # as a broken gRPC connection tells it
    survivor = survivor or start_receiver(store, 2, place(1, 1), flags)
    wait_all([*trainer, survivor])
    checked: bytes = store.get("checked")
    return checked.decode()


def place(num_ranks: int, receiver: int) -> int:
    """The receiver's device, behind the trainer's."""
    num_devices, number = len(visible_devices()), num_ranks + receiver - 1
    if num_devices and number >= num_devices:
        raise SystemExit(
            f"{num_ranks} trainer ranks and {receiver} receivers need {number + 1} devices: use less ranks"
        )
    return number


def control_store() -> TCPStore:
    """How these processes talk, in place of gRPC."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def start_trainer(store: TCPStore, ranks: int, flags: list[str]) -> list[subprocess.Popen[bytes]]:
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = rendezvous.port
    del rendezvous  # frees the port for rank 0
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        _start("trainer", store, flags, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]


def start_receiver(store: TCPStore, number: int, device: int, flags: list[str]) -> subprocess.Popen[bytes]:
    return _start("receiver", store, [*flags, "--number", str(number)], {"LOCAL_RANK": str(device)})


def wait_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends all when one fails. Raises CalledProcessError for that one."""
    try:
        while processes:
            for process in list(processes):
                try:
                    code = process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
                processes.remove(process)
                if code:
                    raise subprocess.CalledProcessError(code, process.args)
    finally:
        for process in processes:
            process.kill()


def _start(role: str, store: TCPStore, flags: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.speed.publish.roles", role, "--port", str(store.port), *flags]
    return subprocess.Popen(command, env={**os.environ, **env}, cwd=Path(__file__).parents[3])


if __name__ == "__main__":
    main()
