"""`flowfleet sweep` and the client's sweeps, against a real controller process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flowfleet.api.jobs import JobStatus
from flowfleet.cli import main as cli
from flowfleet.cli import models
from flowfleet.client import ApiError, AsyncClient, Client
from services.controller.store.store import Store
from tests.flowfleet.idle_controller import in_store, job_settings, with_store

Run = Callable[..., Result]
LR = "trainer.optimizer.lr"
GRID = ("--set", f"{LR}=1e-5,1e-4", "--set", "seed=0..1")


@pytest.fixture
def run(api_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps(job_settings(tmp_path, name="signs")))
    return lambda *words: CliRunner().invoke(cli.app, ["sweep", *words])


@pytest.fixture
def client(api_url: str) -> Iterator[Client]:
    with Client(api_url) as client:
        yield client


def done(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_dry_run_prints_every_job_and_asks_no_controller(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_URL", "http://127.0.0.1:9")
    shown = done(run("job.json", *GRID, "--dry-run", "--name", "lr"))
    assert shown.splitlines() == ["lr: 4", *(f"{LR}={lr} seed={seed}" for lr in ("1e-05", "0.0001") for seed in (0, 1))]
    assert json.loads(done(run("start", "job.json", "--set", "seed=3,1", "--dry-run", "--json"))) == [
        "seed=3",
        "seed=1",
    ]


def test_a_sweep_is_queued_once_and_listed(run: Run, client: Client) -> None:
    told = done(run("job.json", *GRID, "--at-once", "2")).splitlines()
    assert re.fullmatch(r"signs-[0-9a-f]{6}: 4", told[0])
    assert [line.split(" ", 1)[1].strip() for line in told[1:]] == [
        f"{LR}={lr} seed={seed}" for lr in ("1e-05", "0.0001") for seed in (0, 1)
    ]
    assert done(run("job.json", *GRID, "--at-once", "2")).splitlines() == told
    name = told[0].partition(":")[0]
    assert done(run("list")).splitlines() == ["sweeps: 1", f"{name}: 4 queued"]
    assert [job.sweep.at_once for job in client.jobs() if job.sweep] == [2] * 4
    assert f"signs  {LR}=0.0001 seed=1" in CliRunner().invoke(cli.app, ["jobs"]).stdout
    assert f"{name}  {LR}=0.0001 seed=1" in CliRunner().invoke(cli.app, ["show", "last"]).stdout


def test_zipped_settings_and_lists(run: Run, client: Client) -> None:
    pairs = ("--set", "trainer.optimizer.betas=[[0.9, 0.99], [0.8, 0.95]]", "--set", "seed=4,5")
    done(run("job.json", *pairs, "--zip", "--name", "pairs"))
    specs = [client.job(row.id).spec for row in client.sweep_jobs("pairs")]
    assert [(spec["seed"], spec["trainer"]["optimizer"]["betas"]) for spec in specs] == [
        (4, [0.9, 0.99]),
        (5, [0.8, 0.95]),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("job.json", "--set", "sede=0..1"), "sede: unknown setting; did you mean seed? (sede=0; sede=1)"),
        (("job.json", "--set", "seed=0..9999"), "10,000 jobs: a sweep has at most 500"),
        (("job.json", "--set", "seed=1"), "give a setting several values"),
        (("job.json", "--set", f"{LR}=1e-4,2.0", "--set", "seed=0..1"), f"({LR}=2.0 seed=0; {LR}=2.0 seed=1)"),
        (("job.json", "--set", "model.path=/no,/nor"), "no job of the sweep was queued: 2 settings to change"),
        (
            ("job.json", "--set", "seed=0,1", "--set", "schedule.steps=2,3,4", "--zip"),
            "zipped settings equally many",
        ),
        (("job.json", "--set", "seed=0,1", "--name", "No!"), "name: 'No!': give up to 63 lowercase letters"),
        (("absent.json", "--set", "seed=0,1"), "absent.json: cannot be read"),
        (("show", "none"), "no sweep is called 'none'; `flowfleet sweep list` lists them"),
    ],
)
def test_mistakes_are_told_in_words_and_nothing_starts(
    run: Run, client: Client, words: tuple[str, ...], message: str
) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert list(client.jobs()) == []


def play(redis_url: str, client: Client, name: str, *, held_out: bool = True) -> list[str]:
    """Lets three jobs of four run for 30 steps; the second is bad, the third has the best validation."""
    jobs = [row.id for row in client.sweep_jobs(name)]

    async def act(store: Store) -> None:
        for job, best in zip(jobs, (0.5, 0.2, 0.6), strict=False):
            await store.jobs.set_status(job, JobStatus.RUNNING)
            for step, value in ((10, 0.3), (20, best), (30, best - 0.1)):
                metric = "val/reward" if held_out else "critic/rewards/mean"
                await store.history.put_metrics(job, step, {metric: value})
            await store.jobs.update_progress(job, step=30, held_out_reward=best - 0.1, held_out_best=best)

    in_store(redis_url, act)
    return jobs


def test_show_has_settings_against_rewards_the_best_first(run: Run, client: Client, redis_url: str) -> None:
    done(run("job.json", *GRID, "--name", "lr"))
    jobs = play(redis_url, client, "lr")
    title, first, second, caption = done(run("show", "lr")).splitlines()
    assert title.split() == [LR, "JOBS", "HELD", "OUT", "BEST", "HELD", "OUT", "REWARD", "REWARD"]
    assert re.fullmatch(r"0.0001 +1 running, 1 queued +0.600 +0.500 +– *", first)
    half = 12.706 * 0.3 / 2  # of two seeds, 0.5 and 0.2
    assert re.fullmatch(rf"1e-05 +2 running +0.350 ± {half:.3f} +0.250 ± {half:.3f} +– *", second)
    assert caption.strip() == "mean ± half of the 95 % interval over seeds"
    rows = json.loads(done(run("show", "lr", "--json")))
    assert [set(row["jobs"]) for row in rows] == [set(jobs[2:]), set(jobs[:2])]
    assert rows[0]["held_out_best"] == [0.6, None]


@pytest.mark.parametrize("held_out", [True, False])
def test_stop_cancels_what_is_worse_than_the_best(run: Run, client: Client, redis_url: str, held_out: bool) -> None:
    done(run("job.json", *GRID, "--name", "lr"))
    jobs = play(redis_url, client, "lr", held_out=held_out)
    assert done(run("stop", "lr", "--worse-than-best", "0.3", "--after", "31")).splitlines() == ["lr: 0"]
    told = done(run("stop", "lr", "--worse-than-best", "0.3", "--after", "20")).splitlines()
    assert told == ["lr: 1", f"{jobs[1]}  {LR}=1e-05 seed=1  cancelled: 0.1 at step 30, best 0.5"]
    assert [client.job(job).desired for job in jobs] == ["running", "cancelled", "running", "running"]


def test_finish_keeps_models_and_cancels_what_has_none(run: Run, client: Client, redis_url: str) -> None:
    done(run("job.json", *GRID, "--name", "lr"))
    jobs = play(redis_url, client, "lr")
    in_store(redis_url, lambda store: store.jobs.set_status(jobs[0], JobStatus.FAILED))
    told = done(run("finish", "lr")).splitlines()
    assert [line.split()[0] for line in told[1:]] == [jobs[3], jobs[2], jobs[1]]
    assert [line.split()[-1] for line in told[1:]] == ["cancelled", "finished", "finished"]
    assert client.job(jobs[3]).desired == "cancelled"
    assert len(done(run("cancel", "lr")).splitlines()) == 4
    assert [client.job(job).desired for job in jobs[1:]] == ["cancelled"] * 3


def test_export_brings_the_best_settings_best_job(
    run: Run, client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(run("job.json", *GRID, "--name", "lr"))
    jobs = play(redis_url, client, "lr")
    asked: list[Any] = []
    monkeypatch.setattr(models, "export", lambda *words: asked.append(words[:2]))
    assert run("export", "lr").exit_code == 2
    done(run("export", "lr", "--best"))
    assert asked == [(jobs[2], None)]


async def test_python_has_the_same(api_url: str, redis_url: str, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    settings = {LR: [1e-5, 1e-4], "seed": range(2), "trainer.optimizer.betas": [[0.9, 0.99]]}
    async with AsyncClient(api_url) as client:
        jobs = await client.sweep(job_settings(tmp_path), settings, name="mine")
        with pytest.raises(ApiError, match=r"no job of the sweep was queued(.|\n)*\(seed=x\)"):
            await client.sweep(job_settings(tmp_path), {"seed": [0, "x"]})

        async def train(store: Store) -> None:
            for number, job in enumerate(jobs[:2]):
                for step in range(3):
                    await store.history.put_metrics(job.id, step, {"actor/loss": number + 0.25 * step})

        await with_store(redis_url, train)
        frame = await client.sweep_frame("mine")
    assert list(frame.columns) == [LR, "seed", "actor/loss"]
    assert list(frame.index.names) == ["job", "step"]
    assert frame.loc[(jobs[1].id, 2), "actor/loss"] == 1.5
    assert frame.groupby("seed")["actor/loss"].max().to_dict() == {0: 0.5, 1: 1.5}


def test_a_controller_elsewhere_gets_the_data(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AsyncClient, "same_files", property(lambda _: _no()))
    (tmp_path / "mine.csv").write_text("prompt\na sign\n")
    settings = job_settings(tmp_path) | {"data": {"train": "mine.csv"}}
    jobs = client.sweep(settings, {"seed": [0, 1]})
    assert {job.spec["data"]["train"].partition(":")[0] for job in jobs} == {"upload"}
    assert [job.id for job in client.sweep(settings, {"seed": [0, 1]})] == [job.id for job in jobs]


async def _no() -> bool:
    return False
