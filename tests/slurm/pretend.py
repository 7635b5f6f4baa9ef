"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each node with two pretended accelerators."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from flowfleet.redis.server import free_port
from tests.waiting import wait_until

NODES = {"n1": "127.0.0.1", "n2": "127.0.0.2"}
CONFIG = """\
ClusterName=pretend
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
MpiDefault=none
ReturnToService=2
SlurmdTimeout=8
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
GresTypes=gpu
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class PretendSlurm:
    """`cred_expire` is also what a requeued job waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        text = CONFIG.format(host=host, port=free_port(), folder=self.folder, user=user)
        for name, address in NODES.items():
            (self.folder / f"spool-{name}").mkdir()
            text += f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={free_port()} CPUs=2 Gres=gpu:2\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        files = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in FILES]
        self._run("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        wait_until((self.folder / "munge.socket").exists, 10)
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: all(state == "idle" for state in self.states().values()), 30, 0.1)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["scancel", "--full", f"--user={getpass.getuser()}"], timeout=10, check=False)
            wait_until(lambda: not self.ask("squeue", "--noheader"), 30, 0.2)
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()

    def ask(self, *argv: str) -> str:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    def states(self) -> dict[str, str]:
        """Node → its state, such as idle or down*."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in lines)

    def start_controller(self) -> None:
        self._run("slurmctld", "-D")

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-D", "-N", name, label=name)

    def restart_controller(self) -> None:
        self._end("slurmctld")
        self.start_controller()

    def kill_node(self, name: str) -> None:
        """Kills the node's slurmd and all processes of its steps."""
        self._end(name)
        for process in [*processes_on(name)]:
            parent = process.parent()
            with contextlib.suppress(psutil.NoSuchProcess):
                if parent is not None and parent.name() == "slurmstepd":
                    parent.kill()
                process.kill()

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def _run(self, program: str, *argv: str, label: str = "") -> None:
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert path, f"{program} is not installed: run `make test-slurm`"
        with (self.folder / f"{label or program}.log").open("ab") as log:
            self._processes[label or program] = subprocess.Popen(
                [path, *argv], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )


FILES = ("key-file", "pid-file", "log-file", "seed-file")


def processes_on(node: str, matches: Callable[[list[str]], bool] = lambda _: True) -> Iterator[psutil.Process]:
    """Processes of steps on a node whose command line matches."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == node and matches(process.cmdline()):
                yield process
