"""The command line against a real controller process, and the local stack's commands with real processes."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from flowfleet.api.fleet import Fleet, ReplicaView, Shortage
from flowfleet.api.jobs import JobStatus
from flowfleet.api.rewards import ShadowComparison
from flowfleet.cli import main as cli
from flowfleet.cli import views as cli_views
from flowfleet.cli.rewards import command as cli_rewards
from flowfleet.client.client import Client
from flowfleet.data.blobs import open_blobs
from flowfleet.local import secrets
from flowfleet.local.stack import StateDir
from flowfleet.process.service import API_KEY
from flowfleet.redis import keys
from flowfleet.redis.client import connect_sync
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store
from tests.flowfleet.idle_controller import in_store, job_settings
from tests.proxies import DEAD, PROXIES

Run = Callable[..., Result]


@pytest.fixture
def run(api_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command in an empty directory, pointed at the controller."""
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli.app, list(words))


@pytest.fixture
def client(api_url: str) -> Iterator[Client]:
    with Client(api_url) as client:
        yield client


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_settings(tmp_path, name="a-job")))
    return path


def test_submit_prints_the_id_of_the_new_job(run: Run, client: Client, job_file: Path) -> None:
    result = run("submit", str(job_file), "--set", "seed=9", "--set", "schedule.steps=3")

    assert result.exit_code == 0, result.output
    job = client.job(result.stdout.strip())
    assert (job.name, job.spec["seed"], job.progress.steps) == ("a-job", 9, 3)


def test_dry_run_shows_the_whole_job_and_every_process_and_submits_nothing(
    run: Run, client: Client, job_file: Path
) -> None:
    result = run("submit", str(job_file), "--dry-run", "--set", "trainer.world_size=2")

    assert result.exit_code == 0, result.output
    job, processes = result.stdout.split("# Its processes")
    assert yaml.safe_load(job)["trainer"]["optimizer"]["eps"] == 1e-8
    for words in ("services.controller", "services.rollout", "services.reward", "redis-server", "FLOWFLEET_REDIS_URL"):
        assert words in processes
    assert "flowfleet.process.forkserver services.trainer" in processes
    assert "forked from trainers for the job, 2 ranks" in processes
    assert list(client.jobs()) == []


def test_plan_of_a_missing_folder_answers_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flowfleet.planning.plan", None)
    path = tmp_path / "job.toml"
    path.write_text(f'model.path = "{tmp_path}/none"\ndata.train = "t.txt"\nrewards.ocr.weight = 1.0\n')
    told = CliRunner().invoke(cli.app, ["plan", str(path)])
    assert told.exit_code == 1
    assert f"{tmp_path}/none is not a folder" in told.output.replace("\n", "")


def test_plan_tells_what_a_job_needs_without_a_controller(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_qwen_image: Path
) -> None:
    monkeypatch.setenv("FLOWFLEET_URL", "http://127.0.0.1:1")
    settings = job_settings(tmp_path, rollout={"height": 64, "width": 64}) | {"model": {"path": str(tiny_qwen_image)}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(settings))

    table = run("plan", str(path), "--device-memory", "80")
    numbers = json.loads(run("plan", str(path), "--device-memory", "80", "--json", "--set", "trainer.mode=full").stdout)

    assert "Fits devices of 80.0 GiB" in table.stdout
    assert table.stdout.count("\n") < 40
    assert numbers["fits"] is True
    assert numbers["params"] == numbers["trained"] > 0
    masters, state = numbers["trainer"]["gib"]["masters"], numbers["trainer"]["gib"]["optimizer state"]
    assert (masters * 2**30, state) == (4 * numbers["params"], 2 * masters)


def test_plan_for_a_kind_of_device_predicts_its_speed(run: Run, tmp_path: Path, tiny_qwen_image: Path) -> None:
    settings = job_settings(tmp_path, rollout={"height": 64, "width": 64}) | {"model": {"path": str(tiny_qwen_image)}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(settings))

    def planned(name: str, *more: str) -> dict[str, Any]:
        return dict(json.loads(run("plan", str(path), "--device", name, "--json", *more).stdout))

    fast, slow = planned("h200"), planned("rtx-4090")
    assert (fast["device_memory_gib"], slow["device_memory_gib"]) == (140.4, 24.0)
    rates = fast["predicted_images_per_s"], slow["predicted_images_per_s"]
    assert rates[0] / rates[1] == pytest.approx(989 / 165)
    table = run("plan", str(path), "--device", "h200").stdout
    assert "Predicted:" in table
    refused = CliRunner().invoke(cli.app, ["plan", str(path), "--device", "a100", "--set", "model.base=fp8"])
    assert "has no float8 products" in refused.output.replace("\n", " ")
    unknown = CliRunner().invoke(cli.app, ["plan", str(path), "--device", "rtx-1"])
    assert unknown.exit_code == 1
    assert "rtx-4090" in unknown.output


def test_warnings_are_shown_at_submit_in_a_dry_run_and_later(run: Run, client: Client, job_file: Path) -> None:
    one = ("--set", "trainer.updates_per_step=1")
    expected = "warning: algorithm.clip_range has no effect with one update a step"
    submitted = run("submit", str(job_file), *one)
    assert expected in submitted.stderr
    (warning,) = client.job(submitted.stdout.strip()).warnings
    assert f"warning: {warning}".startswith(expected)
    assert expected in run("submit", str(job_file), "--dry-run", *one).stdout
    assert expected in run("show", submitted.stdout.strip()).stdout
    assert "warning" not in run("submit", str(job_file)).stderr


def test_jobs_and_show(run: Run, client: Client, job_file: Path) -> None:
    job = client.submit(job_file)

    listed = run("jobs")
    assert job.id[:13] in listed.stdout
    assert re.search(r"a-job +queued +0/100", listed.stdout)
    shown = run("show", job.id[:13])
    assert job.id in shown.stdout
    assert "steps: 100" in shown.stdout
    assert run("jobs", "--status", "failed").stdout.count("\n") == 1


def test_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    shortage = Shortage(component="rollout", name="wide", reason="0/1 nodes are available")
    told = {"replica_id": "r0", "address": "10.0.0.1:7000", "pool": "default", "incarnation": "1", "health": "serving"}
    numbers = {"job_id": "", "version": 3, "outstanding": 0, "samples_total": 0, "device": ""}
    replica = ReplicaView.model_validate(told | numbers)
    known = Fleet(replicas=[replica], rewards={"ocr": []}, pools=["default", "wide"], shortages=[shortage])
    cli_views.show_fleet(known, Console(width=120))

    shown = capsys.readouterr().out
    assert re.search(r"default +r0 +serving +3", shown)
    assert re.search(r"wide +none", shown)
    assert re.search(r"ocr +none", shown)
    assert "rollout wide: 0/1 nodes are available" in shown


def test_wishes(run: Run, client: Client, job_file: Path) -> None:
    job = client.submit(job_file)

    assert "to be paused" in run("pause", job.id).stdout
    assert run("resume", job.id).exit_code == 0
    assert "to be cancelled" in run("cancel", job.id).stdout
    refused = run("resume", job.id)
    assert refused.exit_code == 1
    assert "error: the job is being cancelled" in refused.stderr


@pytest.mark.parametrize(("status", "code"), [(JobStatus.SUCCEEDED, 0), (JobStatus.FAILED, 1)])
def test_watch_ends_as_the_job_does(
    run: Run, client: Client, job_file: Path, redis_url: str, status: JobStatus, code: int
) -> None:
    job = client.submit(job_file)

    async def play(store: Store) -> None:
        await store.jobs.update_progress(job.id, step=1, reward=0.5)
        await store.jobs.set_status(job.id, status, "the reason")

    in_store(redis_url, play)
    result = run("watch", job.id[:-2])

    assert result.exit_code == code
    assert "reward 0.500" in result.stdout
    assert ("the job failed: the reason" in result.stderr) == (code == 1)


def test_samples_are_downloaded_and_printed(run: Run, client: Client, job_file: Path, redis_url: str) -> None:
    job = client.submit(job_file)

    async def fill(store: Store) -> None:
        for index, score in enumerate((0.25, 0.75)):
            ref = await open_blobs(store.link.redis).put(keys.blob(job.id, "media", index), b"picture", ttl_s=60)
            media: dict[str, Any] = {
                "media_uri": ref.uri,
                "media_size_bytes": ref.size_bytes,
                "media_sha256": ref.sha256,
            }
            sample = SampleRecord(
                step=3, group=1, index=index, prompt="a [b] sign", reward=score, scores={"ocr": score}, **media
            )
            await store.samples.put(job.id, sample)

    in_store(redis_url, fill)
    result = run("samples", job.id, "--out", "pictures", "--order", "best")

    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [["3/1/1", "0.750"], ["3/1/0", "0.250"]]
    assert "a [b] sign" in result.stdout
    assert sorted(path.name for path in Path("pictures").iterdir()) == [
        "train-00003-001-000.png",
        "train-00003-001-001.png",
    ]
    assert Path("pictures/train-00003-001-000.png").read_bytes() == b"picture"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "ffff"], "no job has the id or name 'ffff'"),
        (["submit", "absent.toml"], "absent.toml: cannot be read"),
        (["submit", "job.json", "--set", "sede=1"], "did you mean seed?"),
        (["submit", "job.json", "--set", "rewards.beauty={}"], "this controller has no such reward service"),
        (["jobs", "--url", "http://127.0.0.1:9"], "no controller answers at http://127.0.0.1:9"),
        (["jobs", "--status", "asleep"], "status"),
        (["samples", "ffff", "--order", "odd"], "no job has the id or name"),
        (["up", "--reward", "beauty"], "unknown reward 'beauty'"),
        (["check-reward", "http://host:1"], "give grpc://host:port"),
        (["check-reward", "grpc://host:1", "--ca", "ca.crt"], "say grpcs://host:1"),
        (["check-reward", "host:1", "--param", "region"], "--param 'region': give KEY=VALUE"),
        (["up", "--model", "recipes/tiny/modle"], "there is no such folder; give a diffusers pipeline's"),
        (["up", "--rollout-devices", "0,1", "--replicas", "3"], "names 2 accelerators for 3 rollouts"),
        (["up", "--rollout-devices", "0,1,2", "--sequence-parallel-size", "2"], "for 1 rollouts: 2 are for each"),
        (["up", "--engine", "vllm", "--sequence-parallel-size", "2"], "give --engine diffusers"),
        (["up", "--trainer-devices", ""], "give each once, as in 0,1"),
        (["up", "--trainer-python", "nowhere"], "is no program: give a Python that has flowfleet"),
        (["up", "--pool", "a", "--pool", "a:dtype=bfloat16"], "pool a is given twice"),
        (["pools", "add", "a", "--state-dir", "nowhere"], "on Kubernetes set `pools.a` in the chart's values"),
        (
            ["pools", "remove", "a", "--state-dir", "nowhere"],
            "has no pool 'a' but none; on Kubernetes",
        ),
        (["up", "--rollout-devices", "99", "--port", "0"], "accelerator 99 is asked for, but this machine has"),
        (["demo", "--recipe", "absent.toml"], "absent.toml: cannot be read"),
        (
            ["chaos", "--faults", "100"],
            "`flowfleet chaos` was removed: run `pytest tests/e2e/test_chaos.py` in a clone",
        ),
    ],
)
def test_mistakes_are_told_in_words(run: Run, job_file: Path, words: list[str], message: str) -> None:
    result = run(*words)

    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_rewards_are_shown_and_changed(run: Run, client: Client, job_file: Path) -> None:
    job = client.submit(job_file)

    changed = run("rewards", "set", job.id[:13], "ocr", "weight=0.5", "clip=[0, 0.9]", "params.score=soft")
    assert changed.exit_code == 0, changed.output
    assert changed.stdout == "revision 1, from the next step that is not open yet\n"
    pending = client.rewards(job.id).pending
    assert pending is not None
    assert {name: pending.rewards["ocr"][name] for name in ("weight", "clip", "params")} == {
        "weight": 0.5,
        "clip": [0.0, 0.9],
        "params": {"score": "soft"},
    }
    shown = run("rewards", job.id[:13])
    assert re.search(r"ocr +ocr +1", shown.stdout)  # the job waits: nothing has changed yet
    assert re.search(r"0 +0 +as submitted\s+1 +pending +set ocr", shown.stdout)
    refused = run("rewards", "promote", job.id[:13], "ocr2")
    assert refused.exit_code == 1
    assert "promote.ocr2: there is no such shadow" in " ".join(refused.stderr.split())
    assert "give KEY=VALUE" in run("rewards", "set", job.id[:13], "ocr", "weight").stderr
    both = run("rewards", "set", job.id[:13], "ocr", "weight=1", "weight.x=2")
    assert both.exit_code == 1
    assert "weight.x=2: weight is a value, not a table of settings" in " ".join(both.stderr.split())


def test_a_comparison_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"mean": 0.25, "q05": 0.0, "q25": 0.1, "q50": 0.2, "q75": 0.3, "q95": 0.4, "versions": ["ocr 1"]}
    train = {"samples": 48, "active": scores, "shadow": {"mean": 0.5}, "spearman": 0.912345, "agreement": 0.875}
    nothing: dict[str, Any] = {"active": {}, "shadow": {}}
    found = {"beside": "ocr", "scored": 48, "failed": 2, "left_out": 6, "train": train, "held_out": nothing}
    Console(width=140).print(cli_rewards.comparison_table("ocr2", ShadowComparison.model_validate(found)))

    shown = capsys.readouterr().out
    assert "held out" not in shown
    assert re.search(r"mean +0.25 +0.5", shown)
    assert re.search(r"5, 25, 50, 75, 95 % +0 0.1 0.2 0.3 0.4 +-", shown)
    assert re.search(r"rank correlation +0.912", shown)
    assert re.search(r"same order in groups +0.875", shown)
    assert "48 samples scored, 2 failed, 6 left out" in shown


def options_of(command: Any, name: str = "") -> Iterator[tuple[str, list[str]]]:
    """Options of a command; of a group, those of each command."""
    for child, found in getattr(command, "commands", {}).items():
        yield from options_of(found, f"{name} {child}".strip())
    if not hasattr(command, "commands"):
        yield name, sorted(option for part in command.params for option in part.opts if option.startswith("--"))


def test_the_surface_is_what_users_know() -> None:
    options = dict(options_of(typer.main.get_command(cli.app)))

    assert [name for name, flags in options.items() if "--json" not in flags] == []
    assert {name: [flag for flag in flags if flag != "--json"] for name, flags in options.items()} == {
        "up": [
            "--adapter-slots",
            "--archive",
            "--data-network",
            "--data-root",
            "--data-url",
            "--detach",
            "--dtype",
            "--engine",
            "--hang",
            "--hub-model",
            "--keep",
            "--limit",
            "--max-batch",
            "--model",
            "--no-key",
            "--pool",
            "--port",
            "--replicas",
            "--reward",
            "--rollout-devices",
            "--sequence-parallel-size",
            "--start-timeout",
            "--state-dir",
            "--trainer-devices",
            "--trainer-python",
            "--trainers",
        ],
        "fleet": ["--ca", "--url"],
        "rewards show": ["--ca", "--url"],
        "rewards set": ["--ca", "--open-steps", "--url", "--wait"],
        "rewards reload": ["--state-dir"],
        "rewards shadow": ["--ca", "--for", "--param", "--service", "--url", "--wait"],
        "rewards promote": ["--ca", "--url", "--wait"],
        "rewards remove": ["--ca", "--url", "--wait"],
        "votes show": ["--ca", "--url"],
        "votes export": ["--ca", "--out", "--url"],
        "slurm up": [
            "--account",
            "--constraint",
            "--container",
            "--container-image",
            "--dry-run",
            "--gpus-per-node",
            "--lead",
            "--nodes",
            "--partition",
            "--python",
            "--qos",
            "--reward",
            "--rollouts",
            "--state-dir",
            "--time",
            "--up",
            "--wait",
        ],
        "slurm down": ["--state-dir"],
        "slurm status": ["--state-dir"],
        "slurm logs": ["--follow", "--lines", "--state-dir"],
        "pools list": ["--ca", "--url"],
        "pools add": ["--state-dir"],
        "pools remove": ["--state-dir"],
        "sweep start": ["--at-once", "--ca", "--dry-run", "--name", "--set", "--url", "--zip"],
        "sweep show": ["--ca", "--url"],
        "sweep list": ["--ca", "--url"],
        "sweep cancel": ["--ca", "--url"],
        "sweep finish": ["--ca", "--url"],
        "sweep stop": ["--after", "--ca", "--url", "--worse-than-best"],
        "sweep export": ["--best", "--ca", "--out", "--url"],
        "check-reward": [
            "--allowed",
            "--ca",
            "--cert",
            "--image",
            "--key",
            "--max-batch",
            "--metadata",
            "--param",
            "--prompt",
            "--timeout",
            "--tolerance",
        ],
        "check-model": [],
        "models": [],
        "down": ["--state-dir"],
        "demo": ["--recipe", "--seed", "--set", "--state-dir"],
        "submit": ["--ca", "--check", "--dry-run", "--follow", "--from", "--idempotency-key", "--set", "--url"],
        "plan": ["--device", "--device-memory", "--set", "--text-tokens"],
        "jobs": ["--ca", "--limit", "--status", "--url"],
        "show": ["--ca", "--url"],
        "watch": ["--ca", "--url"],
        "samples": [
            "--best",
            "--ca",
            "--disagree",
            "--limit",
            "--open",
            "--order",
            "--out",
            "--purpose",
            "--step",
            "--url",
            "--worst",
        ],
        "track": [
            "--ca",
            "--mlflow",
            "--pictures",
            "--project",
            "--state-dir",
            "--tensorboard",
            "--trackio",
            "--url",
            "--wandb",
        ],
        "redis-acl": ["--redis6"],
        "try-reward": [
            "--as",
            "--ca",
            "--job",
            "--limit",
            "--metadata",
            "--param",
            "--prompt",
            "--purpose",
            "--step",
            "--timeout",
            "--url",
        ],
        "settings": ["--schema"],
        "doctor": ["--ca", "--state-dir", "--url"],
        "cancel": ["--ca", "--url"],
        "finish": ["--ca", "--url"],
        "eval": [
            "--adapter",
            "--base",
            "--ca",
            "--from",
            "--open",
            "--out",
            "--prompts",
            "--set",
            "--url",
        ],
        "extend": ["--ca", "--steps", "--url"],
        "set": ["--ca", "--priority", "--url"],
        "attach": ["--ca", "--url"],
        "profile": ["--ca", "--steps", "--url"],
        "export": ["--base", "--ca", "--merge", "--out", "--step", "--url"],
        "push": ["--ca", "--private", "--step", "--url"],
        "pause": ["--ca", "--url"],
        "resume": ["--ca", "--url"],
        "delete": ["--before", "--ca", "--files", "--url"],
        "archived": [],
    }


def test_listing_jobs_needs_neither_torch_nor_a_stack() -> None:
    heavy = "{'torch', 'psutil', 'matplotlib', 'grpc', 'redis'}"
    code = f"import sys, flowfleet.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_a_dry_run_imports_neither_torch_nor_diffusers() -> None:
    code = """
import sys
from flowfleet.cli.main import app
try:
    app(["submit", "tiny_ocr", "--dry-run"])
finally:
    print(sorted({"torch", "diffusers", "transformers", "peft"} & {*sys.modules}), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "services.controller" in done.stdout
    assert done.stderr == "[]\n"


UP = ("up", "--detach", "--json", "--port", "0", "--replicas", "0", "--reward", "jpeg_compressibility")


def test_up_detached_serves_and_down_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FLOWFLEET_URL", API_KEY):
        monkeypatch.delenv(name, raising=False)
    for name in PROXIES:
        monkeypatch.setenv(name, DEAD)

    def flowfleet(*words: str) -> Any:
        return subprocess.run([sys.executable, "-m", "flowfleet.cli.main", *words], capture_output=True, text=True)

    started = flowfleet(*UP)
    try:
        assert started.returncode == 0, started.stderr
        stack = StateDir(Path("runs/local")).read()
        assert stack is not None
        shown = json.loads(started.stdout)
        assert (shown["url"], {"redis_url", "api_key"} & {*shown}) == (stack.url, set())
        assert set(stack.processes) == {"redis", "reward-jpeg_compressibility", "controller"}
        with Client(stack.url) as client:
            assert list(client.fleet().rewards) == ["jpeg_compressibility"]
        with connect_sync(stack.redis_url) as redis:
            assert redis.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert (
            httpx.get(f"{stack.url}/v1/jobs", trust_env=False).status_code == 401
        )  # as other users of this machine get it
        assert stack.page == f"{stack.url}/#key={secrets.read(tmp_path / 'runs/local/secrets', 'controller')[API_KEY]}"
        assert flowfleet("jobs").returncode == 0  # finds the stack by its stack.json
        monkeypatch.chdir("/")
        for url in (stack.url, stack.url.replace("127.0.0.1", "localhost") + "/"):
            assert flowfleet("jobs", "--url", url).returncode == 0  # finds the key by the stack's watchdog
        monkeypatch.chdir(tmp_path)
        again = flowfleet("up", "--detach", "--port", "0")
        assert (again.returncode, "already running" in again.stderr) == (1, True)
    finally:
        stopped = flowfleet("down")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")
    assert "no stack runs" in flowfleet("down").stdout
