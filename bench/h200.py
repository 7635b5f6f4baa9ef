"""Measures docs/results.md on one machine of several GPUs: rows side by side, each on GPUs and cores of its own.

    python -m bench.h200 --list
    python -m bench.h200 --only rollout,train --out DIRECTORY     stages or rows by name, in this order
    python -m bench.h200 --tiny --gpus 1 --only loop              what works on a laptop, at a tiny size
    python -m bench.h200 --only rollout-base,train-base,loop-base-only --budget 520    in a call of nine minutes

A row starts when enough GPUs are free, and is ended at its limit; a failure of one row stops no other. After each one
DIRECTORY/results.json holds what all printed so far, and DIRECTORY/logs.tar.gz the ends of what they complained of.
`python -m bench.performance results.json` makes the page of it. Tables of what was measured are printed last.

LoRA on a float8 base, each line for one call of nine minutes, on two H200s where the line says nothing else:

    --only rollout-base,train-base,loop-base-only    rollout and update side by side, then both GPUs sample and train
    --only scaling-2,loop-only-2,loop-only-2-bypass  one update on two GPUs; the loop in bfloat16
    --only loop-idle,loop-idle-bypass                an idle trainer in bfloat16, on four H200s
    --only loop-base-idle                            a rollout, and a trainer that samples while it waits
    --only loop-base-cfg                             guidance 4
    --only loop-base-flash,rollout-base-merged       the tail of MixGRPO-Flash; a merged adapter
    --only loop-base-compare                         services and one process
    --only rollout-base,train-base,loop-base-one     on one GPU, where that is all there is
    --only loop-base-cfg-one,loop-base-flash-one     guidance 4, and the tail, on one GPU
    --only loop-base-h100                            on an H100 of 80 GB
    --only loop-base-one,loop-base-only,lora-4       one, two and four GPUs of a machine, in two calls

Full training, on two H200s and on four:

    --only full2                                     updates: checkpointing full and selective, plain and float8
    --only loop-full,loop-full-fp8                   the loop, plain and float8

Publishing, on four H200s: a rank's masters of full training need 82 GB.

    --only publish,publish-3                         to one receiver and to three
    --only check                                     a receiver killed in a broadcast, of one and of three
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import performance_tables
from bench.performance import figures_in
from flowfleet.hardware.accelerators import visible_devices

POLL_S = 0.2
TAIL_CHARACTERS = 1200
LOG_BYTES = 200_000
PACKAGES = ("torch", "diffusers", "transformers", "vllm", "vllm-omni")
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Compiled code that rows share, below --cache."""
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Sampling and training take turns on one device: without it, what one frees in small pieces is lost to the other."""


@dataclass(frozen=True)
class Measurement:
    """A row: `python -m <arguments>` on so many GPUs, for so long at most. `ranks`: by torchrun."""

    name: str
    stage: str
    gpus: int
    limit_s: float
    arguments: str
    ranks: int | None = None
    tiny: str | None = "--tiny"
    """Added for a laptop; None: runs on GPUs alone."""

    def command(self, *, is_tiny: bool, work: Path) -> list[str]:
        arguments = [
            *self.arguments.format(work=work, name=self.name).split(),
            *((self.tiny or "").split() if is_tiny else ()),
        ]
        if self.ranks is None:
            return [sys.executable, "-m", *arguments]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, "-m", *torchrun, "-m", *arguments]


LOOP = "bench.speed.loop --compile --logs {work}/{name}"
PLAIN_LOOP = f"{LOOP} --steps 3 --reward jpeg_incompressibility"
BASE_LOOP = f"{PLAIN_LOOP} --base fp8"
CFG_LOOP = f"{BASE_LOOP} --guidance 4 --images 64 --micro-batch 4"
ONLY = "--samples only --rollouts 0 --max-staleness 0 --warm-up 1"
FULL = "bench.speed.train --mode full --compile --state 8bit"
FULL_LOOP = f"{PLAIN_LOOP} --mode full --rollouts 2 --trainers 2 --optimizer-state 8bit"
FULL_FP8_LOOP = f"{FULL_LOOP} --quantization fp8 --trainer-quantization fp8"
ON_80_GB = "--images 64 --micro-batch 16 --checkpointing full"
FULLY = "--images 128 --micro-batch 32 --checkpointing full"
BASE_ROLLOUT = "bench.speed.rollout --compile --quantization fp8_base --lora-rank 64 --images 96 --warm-up 2"
BASE_GAP = "bench.speed.gap --base fp8 --lora-rank 64 --variants eager,compiled,merged"
PROOF = "bench.learning.proof --engine vllm-omni --seeds 1 2 3"
TINY_LOOP = "--tiny --images 8 --group-size 4 --batch-size 8 --micro-batch 4 --steps 2 --warm-up 1"
MEASUREMENTS = (
    Measurement("rollout", "rollout", 1, 420, "bench.speed.rollout --compile --images 96 --warm-up 2"),
    Measurement(
        "rollout-cfg",
        "rollout",
        1,
        420,
        "bench.speed.rollout --compile --guidance 4 --images 64 --warm-up 2 --rows service",
    ),
    Measurement(
        "rollout-fp8",
        "rollout",
        1,
        420,
        "bench.speed.rollout --compile --quantization fp8 --images 96 --warm-up 2 --rows service",
        tiny=None,
    ),
    Measurement(
        "rollout-omni",
        "omni",
        1,
        420,
        "bench.speed.rollout --engine vllm-omni --compile --images 96 --warm-up 2 --rows service",
        tiny=None,
    ),
    Measurement(
        "rollout-omni-cfg",
        "omni",
        1,
        420,
        "bench.speed.rollout --engine vllm-omni --compile --guidance 4 --images 64 --warm-up 2 --rows service",
        tiny=None,
    ),
    Measurement(
        "rollout-omni-fp8",
        "omni",
        1,
        420,
        "bench.speed.rollout --engine vllm-omni --compile --quantization fp8 --images 96 --warm-up 2 --rows service",
        tiny=None,
    ),
    Measurement("train-lora-1", "train", 1, 300, "bench.speed.train --compile --batch 8 --micro-batches 4"),
    Measurement(
        "rollout-base",
        "base",
        1,
        420,
        "bench.speed.rollout --compile --quantization fp8_base --lora-rank 64 --images 96 --warm-up 2 --rows service",
        tiny=None,
    ),
    Measurement(
        "train-base", "base", 1, 300, "bench.speed.train --compile --base fp8 --batch 12 --micro-batches 3", tiny=None
    ),
    Measurement("train-lora-4", "train4", 4, 240, "bench.speed.train --compile --batch 16 --micro-batches 2", ranks=4),
    Measurement("scaling-2", "scaling", 2, 240, "bench.speed.train --compile --batch 8 --micro-batches 2", ranks=2),
    Measurement("scaling-4", "scaling", 4, 240, "bench.speed.train --compile --batch 8 --micro-batches 1", ranks=4),
    Measurement(
        "train-full-4",
        "train4",
        4,
        240,
        "bench.speed.train --mode full --compile --batch 16 --checkpointing full --micro-batches 2",
        ranks=4,
    ),
    Measurement("parallel", "parallel", 4, 240, "bench.speed.parallel", ranks=4),
    Measurement("train-full-2", "full2", 2, 300, f"{FULL} --checkpointing full --batch 16 --micro-batches 2", ranks=2),
    Measurement(
        "train-full-2-selective",
        "full2",
        2,
        300,
        f"{FULL} --checkpointing selective --batch 6 --micro-batches 6",
        ranks=2,
    ),
    Measurement(
        "train-full-2-fp8",
        "full2",
        2,
        300,
        f"{FULL} --quantization fp8 --checkpointing selective --batch 6 --micro-batches 6",
        ranks=2,
    ),
    Measurement(
        "train-full-2-fp8-full",
        "full2",
        2,
        300,
        f"{FULL} --quantization fp8 --checkpointing full --batch 16 --micro-batches 2",
        ranks=2,
    ),
    Measurement("publish", "publish", 3, 300, "bench.speed.publish --ranks 1 2"),
    Measurement("publish-3", "publish", 4, 300, "bench.speed.publish --receivers 3"),
    Measurement("gap", "gap", 1, 300, "bench.speed.gap"),
    Measurement(
        "gap-omni", "gap", 1, 400, "bench.speed.gap --variants vllm-omni,vllm-omni-compiled,vllm-omni-fp8", tiny=None
    ),
    Measurement("loop-lora", "loop", 2, 480, f"{LOOP} --images 128 --steps 4", tiny=TINY_LOOP),
    Measurement("loop-lora-cfg", "loop", 2, 500, f"{LOOP} --guidance 4 --images 64 --micro-batch 4", tiny=TINY_LOOP),
    Measurement(
        "loop-only",
        "loop-one",
        1,
        480,
        f"{PLAIN_LOOP} {ONLY} --images 128",
        tiny=TINY_LOOP,
    ),
    Measurement("loop-idle", "loop", 2, 480, f"{PLAIN_LOOP} --samples idle --images 128", tiny=TINY_LOOP),
    Measurement("loop-only-2", "lora-plain", 2, 480, f"{PLAIN_LOOP} {ONLY} --trainers 2 --images 128", tiny=TINY_LOOP),
    Measurement(
        "loop-only-2-bypass",
        "lora-plain",
        2,
        480,
        f"{PLAIN_LOOP} {ONLY} --trainers 2 --images 128 --old-log-probs rollout",
        tiny=TINY_LOOP,
    ),
    Measurement(
        "loop-idle-bypass",
        "loop",
        2,
        480,
        f"{PLAIN_LOOP} --samples idle --images 128 --old-log-probs rollout",
        tiny=TINY_LOOP,
    ),
    Measurement(
        "rollout-base-merged", "lora-merged", 1, 420, f"{BASE_ROLLOUT} --adapter merged --rows service", tiny=None
    ),
    Measurement("loop-base-only", "lora-only", 2, 480, f"{BASE_LOOP} {ONLY} --trainers 2 --images 128", tiny=None),
    Measurement("loop-base-idle", "lora-idle", 2, 480, f"{BASE_LOOP} --samples idle --images 128", tiny=None),
    Measurement("loop-base-cfg", "lora-cfg", 2, 500, f"{CFG_LOOP} {ONLY} --trainers 2", tiny=None),
    Measurement("loop-base-flash", "lora-flash", 2, 480, f"{BASE_LOOP} {ONLY} --trainers 2 --tail-steps 3", tiny=None),
    Measurement("loop-base-one", "lora-one", 1, 560, f"{BASE_LOOP} {ONLY} --images 64", tiny=None),
    Measurement("loop-base-only-4", "lora-4", 4, 480, f"{BASE_LOOP} {ONLY} --trainers 4 --images 256", tiny=None),
    Measurement(
        "loop-base-idle-4",
        "lora-4",
        4,
        480,
        f"{BASE_LOOP} --samples idle --rollouts 2 --trainers 2 --images 256",
        tiny=None,
    ),
    Measurement("loop-base-cfg-one", "lora-one", 1, 480, f"{CFG_LOOP} {ONLY}", tiny=None),
    Measurement(
        "loop-base-flash-one", "lora-one", 1, 480, f"{BASE_LOOP} {ONLY} --images 128 --tail-steps 3", tiny=None
    ),
    Measurement("loop-base-h100", "h100", 1, 500, f"{BASE_LOOP} {ONLY} {ON_80_GB}", tiny=None),
    Measurement("loop-base-compare", "lora-compare", 2, 540, f"{BASE_LOOP} --images 64 --compare", tiny=None),
    Measurement("gap-base", "gap", 1, 400, BASE_GAP, tiny=None),
    Measurement("loop-omni", "loop-omni", 2, 480, f"{LOOP} --engine vllm-omni --images 64 --steps 3", tiny=None),
    Measurement("loop-full", "loop-full", 4, 500, f"{FULL_LOOP} {FULLY}", tiny=TINY_LOOP),
    Measurement("loop-full-fp8", "loop-full-fp8", 4, 500, f"{FULL_FP8_LOOP} {FULLY}", tiny=None),
    Measurement(
        "loop-full-fp8-selective",
        "loop-full-fp8",
        4,
        500,
        f"{FULL_FP8_LOOP} --images 144 --micro-batch 6 --checkpointing selective",
        tiny=None,
    ),
    Measurement("loop-compare", "compare", 2, 540, f"{PLAIN_LOOP} --images 64 --compare", tiny=TINY_LOOP),
    Measurement(
        "loop-kill",
        "kill",
        3,
        540,
        f"{LOOP} --rollouts 2 --images 64 --steps 9 --kill-rollout 2",
        tiny="--tiny --images 8 --group-size 4 --batch-size 8 --micro-batch 4 --steps 6 --warm-up 1",
    ),
    Measurement("proof-lora", "proof", 2, 420, f"{PROOF} --recipe tiny_ocr", tiny=None),
    Measurement("proof-full", "proof", 2, 420, f"{PROOF} --recipe tiny_ocr_full", tiny=None),
    Measurement("proof-lora-cpu", "proof-cpu", 1, 1200, f"{PROOF} --recipe tiny_ocr --cpu", tiny=""),
    Measurement("proof-full-cpu", "proof-cpu", 1, 1200, f"{PROOF} --recipe tiny_ocr_full --cpu", tiny=""),
    Measurement("publish-check", "check", 2, 300, "bench.speed.publish --self-check"),
    Measurement("publish-check-3", "check", 4, 300, "bench.speed.publish --self-check --receivers 3"),
)


@dataclass
class Run:
    """A row that runs, or ran."""

    row: Measurement
    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    process: subprocess.Popen[bytes]
    started: float
    outcome: str = ""


def main() -> int:
    options = _parser().parse_args()
    chosen = select(options.only.split(",") if options.only else [])
    if options.list:
        for row in chosen:
            command = " ".join(row.command(is_tiny=False, work=options.work)[1:])
            print(f"{row.stage:10} {row.name:15} {row.gpus} GPUs, {row.limit_s:.0f} s: {command}")
        return 0
    gpus = tuple(map(str, range(options.gpus))) if options.gpus else visible_devices()
    if not gpus:
        raise SystemExit("no GPUs are visible: for a laptop give --tiny --gpus 1")
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    done = run_all(chosen, gpus, options)
    for run in done:
        print(f"\n== {run.row.name}: {run.outcome}\n{_tail(options.work, run)}")
    print(f"\n{tables(done, options.work)}")
    return int(any(run.outcome.startswith("failed") for run in done))


def tables(done: Sequence[Run], work: Path) -> str:
    """What rollouts, trainers and loops came to, as on the page."""
    rows: dict[str, dict[str, Any]] = {}
    for run in done:
        figures = figures_in((work / f"{run.row.name}.txt").read_text(errors="replace").splitlines())
        if run.outcome.startswith("done") and figures:
            rows[run.row.name] = {"figures": figures}
    made = (
        performance_tables.rollouts(rows),
        performance_tables.trainers(rows),
        performance_tables.loops(rows),
    )
    return "\n\n".join(made)


def select(names: Sequence[str]) -> list[Measurement]:
    """Rows by their own names or their stages', each once, in the order of the names; all without names. Raises
    ValueError for an unknown one."""
    known = {name for row in MEASUREMENTS for name in (row.name, row.stage)}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"--only {','.join(unknown)}: take of {', '.join(sorted(known))}")
    if not names:
        return [*MEASUREMENTS]
    return [*dict.fromkeys(row for name in names for row in MEASUREMENTS if name in (row.name, row.stage))]


def run_all(rows: Sequence[Measurement], gpus: Sequence[str], options: argparse.Namespace) -> list[Run]:
    """The first row that fits the free GPUs goes first; one that cannot run here is reported and left out."""
    waiting = [row for row in rows if (row.tiny is not None if options.tiny else row.gpus <= len(gpus))]
    for row in rows:
        if row not in waiting:
            print(f"{row.name} needs {row.gpus} GPUs; there are {0 if options.tiny else len(gpus)}", flush=True)
    cores = share_cores(sorted(os.sched_getaffinity(0)), gpus)
    free, running, done = [*gpus], list[Run](), list[Run]()
    began, measured_on = time.monotonic(), machine()
    try:
        while waiting or running:
            if time.monotonic() - began > options.budget:
                waiting.clear()
            for row in [*waiting]:
                needed = min(row.gpus, len(gpus))
                if needed <= len(free):
                    taken, free = tuple(free[:needed]), free[needed:]
                    waiting.remove(row)
                    running.append(start(row, taken, tuple(core for gpu in taken for core in cores[gpu]), options))
            time.sleep(POLL_S)
            for run in [*running]:
                if _ended(run, began + options.budget):
                    running.remove(run)
                    done.append(run)
                    free = sorted([*free, *run.gpus])
                    print(f"[{time.monotonic() - began:.0f} s] {run.row.name}: {run.outcome}", flush=True)
                    keep(done, measured_on, options.work, options.out)
    finally:
        for run in running:  # whatever ended this: they would keep their GPUs
            _kill(run)
    return done


def keep(done: Sequence[Run], measured_on: dict[str, Any], work: Path, out: Path) -> None:
    """Writes both files."""
    rows = {
        run.row.name: {
            "outcome": run.outcome,
            "command": run.row.arguments,
            "gpus": run.row.gpus,
            "printed": (work / f"{run.row.name}.txt").read_text(errors="replace").splitlines(),
        }
        for run in done
    }
    (out / "results.json").write_text(json.dumps({"machine": measured_on, "rows": rows}, indent=1))
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for log in sorted(work.rglob("*.log")):
            data = log.read_bytes()[-LOG_BYTES:]
            entry = tarfile.TarInfo(str(log.relative_to(work)))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def machine() -> dict[str, Any]:
    """Devices, versions of what computes, and of this code where that is known."""
    names = list[str]()
    with contextlib.suppress(OSError):
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        names = [line.split(":", 1)[1].partition("(UUID")[0].strip() for line in found.splitlines() if ":" in line]
    devices = f"{len(names)} × {names[0]}" if names else f"{os.cpu_count()} CPUs"
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"devices": devices, "python": platform.python_version(), **versions, **code_version(Path(__file__).parent)}


def code_version(directory: Path) -> dict[str, Any]:
    """The `commit` that is checked out there, and whether it is `dirty`: tracked files differ from it. Empty without a
    repository, or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def share_cores(cores: Sequence[int], gpus: Sequence[str]) -> dict[str, list[int]]:
    """Number of cores for each GPU, at least one."""
    each = max(1, len(cores) // len(gpus))
    return {gpu: [*cores[place * each : (place + 1) * each]] or [*cores] for place, gpu in enumerate(gpus)}


def start(row: Measurement, gpus: tuple[str, ...], cores: tuple[int, ...], options: argparse.Namespace) -> Run:
    """In a session of its own, confined to these."""
    caches = {name: str(options.cache / folder) for name, folder in CACHES.items()}
    scratch = options.work / row.name  # logs of a row that is ended are found there
    scratch.mkdir(exist_ok=True)
    environment = {**ALLOCATOR, **os.environ, **caches, "TMPDIR": str(scratch)}
    environment["OMP_NUM_THREADS"] = str(min(8, len(cores)))
    if not options.tiny:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with (options.work / f"{row.name}.txt").open("wb") as out, (options.work / f"{row.name}.log").open("wb") as log:
        process = subprocess.Popen(
            row.command(is_tiny=options.tiny, work=options.work),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    return Run(row, gpus, cores, process, time.monotonic())


def _ended(run: Run, deadline: float) -> bool:
    """Whether it is done, or was ended at its own limit or at the deadline of all."""
    seconds = time.monotonic() - run.started
    code = run.process.poll()
    if code is None and seconds <= run.row.limit_s and time.monotonic() <= deadline:
        return False
    if code is None:
        run.outcome = f"failed: not done after {seconds:.0f} s"
    else:
        run.outcome = f"done in {seconds:.0f} s" if code == 0 else f"failed with {code} after {seconds:.0f} s"
    _kill(run)
    return True


def _kill(run: Run) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()


def _tail(directory: Path, run: Run) -> str:
    """What a row printed; of a failed one the end of its log."""
    printed = (directory / f"{run.row.name}.txt").read_text(errors="replace").strip()[-TAIL_CHARACTERS:]
    if run.outcome.startswith("failed"):
        printed += "\n" + (directory / f"{run.row.name}.log").read_text(errors="replace").strip()[-TAIL_CHARACTERS:]
    return printed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.h200", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="stages or rows, by comma (all)")
    parser.add_argument("--out", type=Path, default=Path("runs/performance"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/h200"), help="for each row's own files (/tmp/h200)")
    parser.add_argument("--cache", type=Path, default=Path("/tmp"), help="where compiled code is kept (/tmp)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; what runs then is ended")
    parser.add_argument("--gpus", type=int, help="how many (those that are visible)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--list", action="store_true", help="print the rows alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
