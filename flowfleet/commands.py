"""Command lines of processes that more than one part must agree on. Pure and free of torch."""

from __future__ import annotations

from pathlib import Path

from flowfleet.jobs import JobSpec


def trainer_command(spec: JobSpec, *, python: str, port_file: Path, host: str = "127.0.0.1") -> list[str]:
    """The command line of a job's trainer: torchrun on this machine, one rank an accelerator."""
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.trainer.world_size}"]
    flags = ["--host", host, "--port-file", str(port_file), "--metrics-port", "0"]
    return [*torchrun, "--max-restarts=0", "-m", "services.trainer", *flags]
