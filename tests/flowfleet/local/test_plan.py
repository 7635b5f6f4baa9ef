import sys
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from flowfleet.hardware.accelerators import VISIBLE
from flowfleet.job.files import RECIPES
from flowfleet.local.placement import place
from flowfleet.local.plan import StackOptions, data_roots, make_plan, ports_needed
from flowfleet.local.pools import Pool
from flowfleet.local.secrets import StackSecrets
from flowfleet.local.stack import MARK, StackError
from services.controller.reading.places import Places

SECRETS = StackSecrets()


def test_every_process_gets_its_own_port_and_the_controller_knows_the_rewards(tmp_path: Path) -> None:
    options = StackOptions(
        state_dir=tmp_path,
        pools=(Pool(replicas=2, model="some/model"),),
        rewards=("ocr", "mine=10.0.0.7:9000"),
        port=8470,
    )
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server", "x.conf"], SECRETS)

    by_name = {process.name: process for process in plan.processes}
    assert list(by_name) == ["redis", "rollout-0", "rollout-1", "reward-ocr", "controller"]
    listening = [process.address for process in plan.processes]
    listening += [process.metrics for process in plan.processes if process.metrics not in (None, process.address)]
    assert len(set(listening)) == len(listening)
    controller = by_name["controller"].argv
    assert controller[:3] == (sys.executable, "-m", "services.controller")
    assert f"ocr={by_name['reward-ocr'].address}" in controller
    assert "mine=10.0.0.7:9000" in controller
    assert by_name["rollout-1"].argv[-4:-2] == ("--model", "some/model")
    assert plan.url == "http://127.0.0.1:8470"


def test_the_redis_password_stands_in_no_command_line(tmp_path: Path) -> None:
    options = StackOptions(state_dir=tmp_path)
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server", "x.conf"], SECRETS)

    assert not any("secret" in word for process in plan.processes for word in process.argv)
    with_redis = {p.name for p in plan.processes if "FLOWFLEET_REDIS_URL" in p.env}
    assert with_redis == {"controller", "rollout-0"}
    assert all(process.env[MARK] == str(tmp_path) for process in plan.processes)


def test_jobs_may_read_the_working_folder_and_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = StackOptions(data_roots=(Path("more"),), data_urls=("https://data.example.org",))
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], SECRETS)
    argv = plan.processes[-1].argv
    roots = [argv[place + 1] for place, word in enumerate(argv) if word == "--data-root"]
    assert roots == [str(tmp_path), str(RECIPES.resolve()), str(tmp_path / "more")]
    assert argv[argv.index("--data-url") + 1] == "https://data.example.org"
    monkeypatch.chdir("/")
    with pytest.raises(StackError, match="start the stack in another folder"):
        make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], SECRETS)


def test_jobs_may_read_a_preloaded_snapshot_of_the_hugging_face_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, work = tmp_path / "hub" / "models--a--b", tmp_path / "work"
    snapshot = repository / "snapshots" / "0123"
    for folder in (snapshot, repository / "blobs", work):
        folder.mkdir(parents=True)
    (repository / "blobs" / "ab").write_text("{}")
    (snapshot / "model_index.json").symlink_to("../../blobs/ab")
    monkeypatch.chdir(work)
    roots = data_roots(StackOptions(pools=(Pool(model=str(snapshot)),)))
    assert roots == [work, RECIPES.resolve(), repository]
    assert Places.of(roots, [], work / "state").model(str(snapshot)) == snapshot
    assert data_roots(StackOptions(pools=(Pool(model=str(tmp_path / "model")),)))[-1] == tmp_path / "model"


def test_port_zero_lets_the_controller_take_a_free_one(tmp_path: Path) -> None:
    options = StackOptions(state_dir=tmp_path, port=0)
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], SECRETS)

    assert plan.url == "http://127.0.0.1:20001"


def test_each_rollout_is_confined_to_its_accelerator_and_the_controller_knows_the_trainers(tmp_path: Path) -> None:
    options = StackOptions(state_dir=tmp_path, pools=(Pool(replicas=2, engine="vllm-omni", max_batch=12),))
    placement = place(options.pools, ["0", "1", "2", "3"])
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], SECRETS, placement)

    by_name = {process.name: process for process in plan.processes}
    shown = [
        {name: by_name[rollout].env.get(name) for name in VISIBLE.values()} for rollout in ("rollout-0", "rollout-1")
    ]
    assert shown == [dict.fromkeys(VISIBLE.values(), "0"), dict.fromkeys(VISIBLE.values(), "1")]
    assert by_name["rollout-1"].argv[-6:] == ("--engine", "vllm-omni", "--hang-s", "60", "--max-batch", "12")
    argv = by_name["controller"].argv
    assert argv[argv.index("--trainer-devices") + 1] == "2,3"
    assert not any(set(VISIBLE.values()) & set(by_name[name].env) for name in ("redis", "reward-ocr", "controller"))


@pytest.mark.parametrize(("slots", "flags"), [(None, []), (0, ["0"]), (8, ["8"])])
def test_rollouts_have_the_adapter_slots_of_their_pool(tmp_path: Path, slots: int | None, flags: list[str]) -> None:
    options = StackOptions(state_dir=tmp_path, pools=(Pool(adapter_slots=slots),))
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], SECRETS)
    argv = next(process.argv for process in plan.processes if process.name == "rollout-0")
    assert [after for flag, after in pairwise(argv) if flag == "--adapter-slots"] == flags


def test_a_rollout_has_the_accelerators_that_share_its_samples(tmp_path: Path) -> None:
    options = StackOptions(state_dir=tmp_path, pools=(Pool(replicas=2, sequence_parallel_size=2),))
    placement = place(options.pools, [*"01234"])
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], SECRETS, placement)
    rollouts = [process for process in plan.processes if process.name.startswith("rollout")]
    assert [process.devices for process in rollouts] == [("0", "1"), ("2", "3")]
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in rollouts] == ["0,1", "2,3"]
    assert {process.argv[-2:] for process in rollouts} == {("--sequence-parallel-size", "2")}
    assert placement.trainer == ("4",)


def test_devices_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValidationError, match="names 2 accelerators for 1 rollouts"):
        Pool(devices=("0", "1"))
    with pytest.raises(ValidationError, match="give each once"):
        StackOptions(trainer_devices=("0", "0"))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [(("beauty",), "unknown reward 'beauty'"), (("ocr", "ocr=host:1"), "'ocr' is given twice")],
)
def test_wrong_rewards_are_refused(rewards: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        StackOptions(rewards=rewards)
