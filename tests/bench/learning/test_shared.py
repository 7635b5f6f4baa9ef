"""Rewards that the runs of a GPU share, as real services."""

import math
import os
import socket
from pathlib import Path

import pytest
from rich.console import Console

from bench.learning.runs import Place, Run, _train_in_process, train_all
from bench.learning.shared import RUNS_PER_SERVICE, shared_rewards

CORES = tuple(sorted(os.sched_getaffinity(0)))


def answers(reward: str) -> bool:
    host, _, port = reward.partition("=")[2].rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def test_runs_of_a_gpu_share_services_that_end_with_the_block() -> None:
    gpus = ("", *["0"] * (RUNS_PER_SERVICE + 1))
    where = [Place((CORES[0],), gpu, (f"was={number}",)) for number, gpu in enumerate(gpus)]  # places differ
    with shared_rewards(where, ["small=jpeg_compressibility"]) as shared:
        assert [place.gpu for place in shared] == [place.gpu for place in where], "in the same order"
        on_cpu, *others = shared
        assert on_cpu.rewards == ()
        found = [place.rewards for place in others]
        assert len(set(found)) == 2, "one for eight runs"
        assert all(name.startswith("small=") and answers(name) for (name,) in found)
    assert not any(answers(name) for (name,) in found)


def test_a_reward_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    settings = tmp_path / "reward.toml"
    settings.write_text('name = "mine"\nfunction = "no.such.module:score"\n')
    with (
        pytest.raises(ValueError, match=r"(?s)the reward mine failed to start; the end of its log:.*no\.such"),
        shared_rewards([Place((CORES[0],), "0")], [f"mine={settings}"]),
    ):
        pass


def test_after_a_failure_later_runs_there_start_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, seen = [Run("tiny_ocr", seed, tmp_path / str(seed)) for seed in (1, 2, 3)], list[tuple[str, ...]]()

    def train(run: Run, place: Place) -> str | None:
        seen.append(place.rewards)
        return "it broke" if run.seed == 1 else None

    monkeypatch.setattr("bench.learning.runs._train_in_process", train)
    where = [Place((0,), "0", ("mine=127.0.0.1:9",))]
    assert train_all(lambda _: runs, where, math.inf, Console(quiet=True)) == {runs[0]: "it broke"}
    assert seen == [("mine=127.0.0.1:9",), (), ()]


def test_a_run_takes_the_rewards_of_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list[list[str]]()
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command))
    run = Run("tiny_ocr", 1, tmp_path / "a", rewards=("mine=jpeg_compressibility", "ocr"))
    with pytest.raises(AttributeError, match="returncode"):
        _train_in_process(run, Place((0,), "1", ("mine=127.0.0.1:9", "other=127.0.0.1:8")))
    given = [value for flag, value in zip(commands[0], commands[0][1:], strict=False) if flag == "--reward"]
    assert given == ["mine=127.0.0.1:9", "ocr"]
