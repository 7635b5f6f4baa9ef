"""Evaluations: the jobs that the client submits, and the numbers that it makes of their samples."""

import json
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfleet.api.jobs import Job, JobStatus
from flowfleet.api.problems import ApiError
from flowfleet.api.samples import Sample
from flowfleet.cli import main as cli
from flowfleet.client.client import Client
from flowfleet.client.evaluation.comparison import Evaluated, as_json, columns
from flowfleet.client.evaluation.jobs import LORA, evaluate, evaluations
from flowfleet.job.spec import JobSpec
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.idle_controller import in_store, job_settings
from tests.models_on_disk import write_model


@pytest.fixture
def client(api_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    with Client(api_url) as client:
        yield client


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file with held-out prompts and settings that only training has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held-out.txt").write_text("a\nb\n")
    (tmp_path / "mine.txt").write_text("c\n")
    trainer = {"ema": {"decay": 0.9}, "optimizer": {"warmup_updates": 3, "lr_schedule": "linear"}}
    schedule = {"steps": 20, "save_every": 2, "validate_every": 2, "keep_best": 1}
    parts = job_settings(tmp_path, name="signs", trainer=trainer, schedule=schedule)
    parts["data"]["validation"] = "held-out.txt"
    path = tmp_path / "job.json"
    path.write_text(json.dumps(parts))
    return path


def specs(client: Client, file: Path | None, *adapters: str, **others: Any) -> list[tuple[str, JobSpec]]:
    given: dict[str, Any] = {"origin": None, "base": True, "changes": (), "say": lambda line: None} | others
    return evaluations(client, file, adapters, **given)


def lora_of(spec: JobSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec.trainer.lora, name) for name in LORA)


def with_model(client: Client, controller: IdleController, parts: dict[str, Any], kind: str = "adapter") -> str:
    """Submits a job, and leaves a model of step 4 where it would export one."""
    job_id = client.submit(parts).id
    folder = controller.state_dir / "jobs" / job_id / "checkpoints" / "step-00000004" / "model"
    manifest = write_model(folder, job_id, 4, b"weights").model_copy(update={"kind": kind})
    (folder / "flowfleet.json").write_text(manifest.model_dump_json())
    return job_id


def test_the_base_and_each_adapter_are_jobs_that_differ_in_the_adapter_alone(
    client: Client, idle_controller: IdleController, file: Path, tmp_path: Path
) -> None:
    lora = {"rank": 8, "alpha": 4.0, "target_modules": ["to_q"]}
    parts = json.loads(file.read_text())
    parts["data"]["validation"] = str(tmp_path / "held-out.txt")
    job_id = with_model(client, idle_controller, {**parts, "trainer": {"lora": lora}})
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6, "target_modules": ["to_k"]}')
    found = specs(client, file, f"job:{job_id[:13]}@4", "peft", changes=["data.validation=mine.txt"])
    assert [label for label, _ in found] == ["base", f"job:{job_id[:13]}@4", "peft"]
    base, of_job, of_path = (spec for _, spec in found)
    assert base.is_evaluation
    assert (base.name, base.model.adapter, base.averages) == ("signs-eval-base", None, False)
    assert (of_job.name, of_path.name) == (f"signs-eval-job-{job_id[:13]}-4", "signs-eval-peft")
    assert base.data.validation == str(tmp_path / "mine.txt")
    assert of_job.model.adapter == f"job:{job_id}@4"
    assert (of_job.trainer.lora.rank, of_job.trainer.lora.alpha, of_job.trainer.lora.target_modules) == (
        8,
        4,
        ("to_q",),
    )
    assert of_path.model.adapter == str(peft)
    assert lora_of(of_path) == (2, 6, ("to_k",))
    for spec in (of_job, of_path):
        plain = spec.model_dump()
        plain["name"], plain["model"]["adapter"], plain["trainer"]["lora"] = (
            base.name,
            None,
            base.trainer.lora.model_dump(),
        )
        assert plain == base.model_dump()


def test_a_size_that_is_asked_for_goes_before_the_jobs_own_for_held_out_samples(client: Client, file: Path) -> None:
    parts = json.loads(file.read_text())
    parts.setdefault("rollout", {}).update({"height": 256, "width": 256})
    parts["schedule"] |= {"validation_height": 512, "validation_width": 512}
    file.write_text(json.dumps(parts))
    for changes, height, width in (
        ([], 512, 512),
        (["rollout.height=1024"], 1024, 512),
        (["rollout.height=1024", "rollout.width=768"], 1024, 768),
        (["schedule.validation_height=1024"], 1024, 512),
    ):
        [(_, spec)] = specs(client, file, changes=changes)
        assert (spec.validation_size.height, spec.validation_size.width) == (height, width)


def test_a_job_is_evaluated_with_its_own_settings_and_full_weights_as_a_pipeline(
    client: Client, idle_controller: IdleController, file: Path, tmp_path: Path
) -> None:
    parts = json.loads(file.read_text())
    parts["data"]["validation"] = str(tmp_path / "held-out.txt")
    parts["trainer"]["mode"] = "full"
    job_id = with_model(client, idle_controller, parts, "pipeline")
    ((_, base), (label, own)) = specs(client, None, origin=job_id, changes=["rollout.guidance_scale=3"])
    assert (label, own.trainer.mode, own.model.adapter) == (f"job:{job_id}", "lora", None)
    assert own.model.path == f"job:{job_id}@4"  # the job has not ended
    assert base.model.path == parts["model"]["path"]
    assert own.rollout.guidance_scale == 3
    assert specs(client, file, origin=f"{job_id}@4", base=False)[0][1].model.path == f"job:{job_id}@4"


def test_what_cannot_be_evaluated_is_told_before_anything_is_submitted(
    client: Client, idle_controller: IdleController, file: Path, tmp_path: Path
) -> None:
    parts = json.loads(file.read_text())
    parts["data"].pop("validation")
    parts["trainer"] = {}
    parts["schedule"] = {}
    job_id = client.submit(parts).id
    for words, said in (
        (["eval"], "--from ID"),
        (["eval", "--from", job_id], "no held-out prompts to evaluate: name them by --set data.validation=FILE"),
        (["eval", str(file), "--adapter", f"job:{job_id}@x"], "job:ID@STEP"),
        (["eval", str(file), "--adapter", f"job:{job_id}"], "no model"),
        (["eval", str(file), "--no-base"], "give --adapter"),
        (["eval", str(file), "--set", "rewards={}"], "name at least one reward service"),
        (["eval", str(file), "--adapter", "/nowhere"], "model.adapter"),
    ):
        refused = CliRunner().invoke(cli.app, words)
        assert refused.exit_code == 1, words
        assert said in " ".join(refused.stderr.split()), refused.stderr
    assert {job.status for job in client.jobs() if job.name.startswith("signs-eval")} <= {
        JobStatus.CANCELLED,
        JobStatus.QUEUED,
    }
    assert all(job.desired == "cancelled" for job in client.jobs() if job.name.startswith("signs-eval"))
    with pytest.raises(ApiError, match="evaluates and has no data to train on"):
        client.extend(client.submit(specs(client, file)[0][1]).id, 5)


def test_an_adapter_of_another_model_is_told(
    client: Client, idle_controller: IdleController, file: Path, tmp_path: Path
) -> None:
    job_id = with_model(client, idle_controller, json.loads(file.read_text()) | {"trainer": {}, "schedule": {}} | {
        "data": {"train": str(tmp_path / "prompts.txt")}
    })  # fmt: skip
    told: list[str] = []
    specs(client, file, f"job:{job_id}", say=told.append)
    assert told == []
    (tmp_path / "other").mkdir()
    specs(client, file, f"job:{job_id}", changes=["model.path=other"], say=told.append)
    assert told == [
        f"warning: job:{job_id} was trained on {tmp_path / 'model'}, and is evaluated on {tmp_path / 'other'}"
    ]


def test_a_hub_name_without_a_commit_is_the_model_that_a_job_pinned(
    client: Client, idle_controller: IdleController, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = with_model(client, idle_controller, json.loads(file.read_text()) | {"trainer": {}, "schedule": {}} | {
        "data": {"train": str(tmp_path / "prompts.txt")}
    })  # fmt: skip
    job, trained = client.find(job_id), f"Org/Model@{'a' * 40}"
    job.spec["model"]["path"] = trained
    monkeypatch.setattr(client, "find", lambda which: job)
    told: list[str] = []
    for used in ("Org/Model", "Org/Model@main", trained, f"/cache/models--Org--Model/snapshots/{'a' * 40}"):
        specs(client, file, f"job:{job_id}", changes=[f"model.path={used}"], say=told.append)
        assert told == [], used
    for used in (f"Org/Model@{'b' * 40}", "Org/Other", "/models/mine"):
        specs(client, file, f"job:{job_id}", changes=[f"model.path={used}"], say=told.append)
        assert told.pop() == f"warning: job:{job_id} was trained on {trained}, and is evaluated on {used}"


# -- numbers -----------------------------------------------------------------------------------------------------------


def model(
    label: str, rewards: dict[tuple[int, int], float | None], status: str = "succeeded", seed: int = 7
) -> Evaluated:
    """Prompt and index → reward; a score of `ocr` is twice that."""
    facts: dict[str, Any] = {"id": label * 8, "name": "n", "status": status, "desired": "running"}
    job = Job(**facts, created_at=datetime.now(UTC), spec={"rewards": {"ocr": {}}}, reason="lost")
    samples = [
        Sample(
            step=0, group=group, index=index, purpose="validate", prompt=f"p{group}", reward=reward,
            scores={} if reward is None else {"ocr": 2 * reward}, seed=seed + 10 * group + index,
        )
        for (group, index), reward in rewards.items()
    ]  # fmt: skip
    return Evaluated(label, job, samples)


def test_errors_are_those_of_means_over_prompts_and_changes_are_paired() -> None:
    first = model("a", {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.6, (1, 1): 0.8, (2, 0): 0.0, (2, 1): 0.4})
    other = model("b", {(0, 0): 0.3, (0, 1): 0.5, (1, 0): 0.9, (1, 1): 0.9, (2, 0): 0.2, (2, 1): None})
    score = first.score("reward")
    assert score is not None
    assert score.mean == pytest.approx(statistics.fmean([0.2, 0.7, 0.2]))
    assert score.error == pytest.approx(statistics.stdev([0.2, 0.7, 0.2]) / sqrt(3))
    assert score.samples == 6
    change = other.change(first, "ocr")
    assert change is not None
    assert change.mean == pytest.approx(2 * statistics.fmean([0.2, 0.2, 0.2]))
    assert change.error == pytest.approx(0.0, abs=1e-12)
    assert change.samples == 5
    assert model("c", {(0, 0): 0.3}, seed=8).change(first, "reward") is None  # another seed is no pair


def test_a_single_prompt_has_the_error_over_its_samples() -> None:
    one = model("a", {(4, 0): 0.1, (4, 1): 0.3, (4, 2): 0.8}).score("reward")
    assert one is not None
    assert one.error == pytest.approx(statistics.stdev([0.1, 0.3, 0.8]) / sqrt(3))
    alone = model("a", {(4, 0): 0.1}).score("reward")
    assert alone is not None
    assert (alone.mean, alone.error) == (0.1, None)
    assert model("a", {(4, 0): None}).score("reward") is None


def test_the_command_shows_a_row_a_model_and_writes_page_and_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: Client
) -> None:
    models = [
        model("base", {(0, 0): 0.25, (1, 0): 0.5}),
        model("mine", {(0, 0): 0.75, (1, 0): 0.75}),
        Evaluated("bad", model("bad", {}, "failed").job),
    ]
    monkeypatch.setattr("flowfleet.cli.evaluation.evaluate", lambda *args, **kinds: models)
    done = CliRunner().invoke(cli.app, ["eval", "job.toml", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1  # one of them failed
    for said in ("0.375 ± 0.125", "0.750 ± 0.000 (+0.375 ± 0.125)", "1.500 ± 0.000 (+0.750 ± 0.250)", "failed: lost"):
        assert said in done.stdout, done.stdout
    assert columns(models) == ["reward", "ocr"]
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == as_json(models[:2])
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<article") == 4
    assert page.index(">base<") < page.index(">mine<")
    shown = CliRunner().invoke(cli.app, ["eval", "job.toml", "--json", "--out", str(tmp_path / "out")])
    rows = json.loads(shown.stdout)
    assert [(row["model"], row["status"]) for row in rows] == [
        ("base", "succeeded"),
        ("mine", "succeeded"),
        ("bad", "failed"),
    ]
    assert rows[1]["scores"]["reward"]["change"] == {"mean": 0.375, "standard_error": 0.125, "samples": 2}


def test_jobs_are_waited_for_and_what_becomes_of_them_is_told(client: Client, file: Path, redis_url: str) -> None:
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        if (job_id := line.split()[-1]) and line.startswith("base: job "):
            in_store(redis_url, lambda store: store.jobs.set_status(job_id, JobStatus.RUNNING, "no replica"))
        elif line == "base: running: no replica":
            job_id = told[0].split()[-1]
            in_store(redis_url, lambda store: store.jobs.set_status(job_id, JobStatus.FAILED, "the model is gone"))

    (found,) = evaluate(client, file, say=say)
    assert told[1:] == ["base: running: no replica", "base: failed: the model is gone"]
    assert (found.label, found.job.status, found.samples) == ("base", JobStatus.FAILED, ())


def test_prompts_of_its_own_replace_those_of_all_sources(client: Client, file: Path, tmp_path: Path) -> None:
    parts = json.loads(file.read_text())
    source = {"name": "signs", "path": str(tmp_path / "prompts.txt"), "validation": str(tmp_path / "held-out.txt")}
    parts["data"] = {"sources": [source]}
    file.write_text(json.dumps(parts))
    ((_, own),) = specs(client, file)
    assert [setting for setting, _, _ in own.data_files] == ["data.sources.0.validation"]
    ((_, replaced),) = specs(client, file, changes=["data.validation=mine.txt"])
    assert [(setting, place) for setting, place, _ in replaced.data_files] == [
        ("data.validation", str(tmp_path / "mine.txt"))
    ]
