"""Command lines of processes that more than one part must agree on. Pure and free of torch."""

from pathlib import Path
from typing import Final

TRAINER: Final = "services.trainer"
ROLLOUT: Final = "services.rollout"
POD_PORT: Final = 7000
"""gRPC of rollouts, rewards and the trainer's rank 0 in pods."""
HEALTH_PORT: Final = 7001
SAMPLE_PORT: Final = 7100
"""gRPC of a trainer's ranks that sample: this one and those that follow, a port for each rank of a pod."""
METRICS_PORT: Final = 9470
RENDEZVOUS_PORT: Final = 29500
RENDEZVOUS_TIMEOUT_S: Final = 86_400
"""Pods that have a node wait so long for the others. The controller ends those that cannot all be placed long before
(services/controller/platforms/kubernetes/placement.py)."""
SHUTDOWN_MARGIN_S: Final = 10
"""Seconds after the drain in which ranks may still end; torchrun then kills them."""


def forkserver_command(python: str, *modules: str) -> list[str]:
    """The process from which this machine's processes of these modules are forked, but for the number of its socket."""
    return [python, "-m", "flowfleet.process.forkserver", *modules]


def trainer_flags(port_file: Path) -> list[str]:
    """Flags of each rank of a trainer on this machine."""
    return ["--host", "127.0.0.1", "--port-file", str(port_file), "--metrics-port", "0"]


def trainer_step_command(
    python: str, *, nodes: int, node_rank: int, ranks: int, master: str, host: str, port_file: Path, drain_s: float
) -> list[str]:
    """Command of the ranks of one node in a step of Slurm. `master` is host:port of the first node; `host` the node's
    own address. One rank alone needs no torchrun."""
    flags = ["--host", host, "--port-file", str(port_file), "--metrics-port", "0", "--drain-s", f"{drain_s:g}"]
    if nodes * ranks == 1:
        return [python, "-m", TRAINER, *flags]
    address, _, port = master.rpartition(":")
    torchrun = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        f"--node-rank={node_rank}",
        "--rdzv-backend=static",
        f"--shutdown-timeout={drain_s + SHUTDOWN_MARGIN_S:.0f}",
        f"--master-addr={address}",
        f"--master-port={port}",
        "--max-restarts=0",
    ]
    return [python, "-m", "torch.distributed.run", *torchrun, "-m", TRAINER, *flags]


def trainer_pod_command(*, pods: int, ranks_per_pod: int, master: str, drain_s: int) -> list[str]:
    """Arguments of `python -m torch.distributed.run` in each pod of an Indexed Job. Kubernetes substitutes
    $(JOB_COMPLETION_INDEX) and $(POD_IP). `master` is the name of the first pod."""
    torchrun = [
        f"--nnodes={pods}",
        f"--nproc-per-node={ranks_per_pod}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--rdzv-backend=static",
        f"--shutdown-timeout={drain_s + SHUTDOWN_MARGIN_S}",
        f"--rdzv-conf=timeout={RENDEZVOUS_TIMEOUT_S}",
        f"--master-addr={master}",
        f"--master-port={RENDEZVOUS_PORT}",
    ]
    ports = ["--port", str(POD_PORT), "--health-port", str(HEALTH_PORT), "--metrics-port", str(METRICS_PORT)]
    sample_flags = ["--sample-port", str(SAMPLE_PORT), "--transfer-host", "$(POD_IP)", "--drain-s", str(drain_s)]
    flags = ["--host", "0.0.0.0", *ports, *sample_flags]
    never = "--max-restarts=0"  # a new trainer resumes from the last checkpoint
    return [*torchrun, never, "-m", "services.trainer", *flags]
