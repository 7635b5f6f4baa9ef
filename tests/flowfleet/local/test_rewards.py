"""What `flowfleet up --reward` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfleet.local.plan import StackOptions, make_plan, ports_needed
from flowfleet.local.rewards import Reward, parse_reward
from flowfleet.local.secrets import StackSecrets
from services.reward.settings import read_settings


def test_scorers_with_settings_under_names_and_services(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").touch()
    mine = ("function=my_rewards:score", f"path={tmp_path}", "name=mine")
    assert parse_reward("ocr") == Reward("ocr", "ocr")
    assert parse_reward("pickscore:model=a/b,dtype=bfloat16") == Reward(
        "pickscore", "pickscore", ("model=a/b", "dtype=bfloat16")
    )
    assert parse_reward("taste=pickscore:model=a") == Reward("taste", "pickscore", ("model=a",))
    assert parse_reward("jpeg=jpeg_compressibility") == Reward("jpeg", "jpeg_compressibility")
    assert parse_reward(f"mine={tmp_path}/my_rewards.py:score") == Reward("mine", "python", mine)
    assert parse_reward("mine=10.0.0.7:9000") == Reward("mine", address="10.0.0.7:9000")


def test_settings_in_a_file_say_where_the_module_is(tmp_path: Path) -> None:
    there, here = tmp_path / "there.toml", tmp_path / "here.toml"
    there.write_text('function = "my_rewards:score"\npath = "/rewards"\n')
    here.write_text('function = "my_rewards:score"\n')
    assert parse_reward(f"mine={there}") == Reward("mine", "python", ("name=mine",), settings_file=there)
    assert parse_reward(f"mine={here}").settings == ("name=mine", f"path={Path.cwd()}")


def test_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "pick").mkdir(parents=True)
    assert parse_reward("pickscore:model=models/pick").settings == (f"model={tmp_path}/models/pick",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "unknown reward 'nonsense': give a scorer"),
        ("mine=nonsense", "unknown reward"),
        ("mine=missing.py:score", "there is no file missing.py"),
        ("mine=missing.toml", "there is no file missing.toml"),
        ("pickscore:model", "'model' is not a setting"),
        ("a b=ocr", "'a b' is not a name"),
        ("my.py:score", "'my.py' is not a name"),
    ],
)
def test_what_is_no_reward_is_refused_with_the_forms(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_reward(text)


def test_the_service_is_started_with_its_settings(tmp_path: Path) -> None:
    options = StackOptions(state_dir=tmp_path, rewards=("taste=pickscore:model=a/b,dtype=bfloat16",))
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], StackSecrets())
    [reward] = [process for process in plan.processes if process.name == "reward-taste"]
    assert reward.argv[reward.argv.index("--scorer") :][:2] == ("--scorer", "pickscore")
    assert reward.argv[-4:] == ("--set", "model=a/b", "--set", "dtype=bfloat16")
    assert f"taste={reward.address}" in plan.processes[-1].argv


def test_the_service_reads_its_settings_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('path = "/rewards"\n')
    options = StackOptions(state_dir=tmp_path, rewards=(f"mine={tmp_path}/mine.toml",))
    plan = make_plan(options, range(20_000, 20_000 + ports_needed(options)), ["redis-server"], StackSecrets())
    [reward] = [process for process in plan.processes if process.name == "reward-mine"]
    assert reward.argv[-4:] == ("--settings", f"{tmp_path}/mine.toml", "--set", "name=mine")


@pytest.mark.parametrize("name", ["nan", "true", "1", "1e5", "inf", "2024-01-01", "0x1F", "null", "mine"])
@pytest.mark.parametrize("suffix", ["py:score", "toml"])
def test_a_name_is_text_whatever_it_looks_like(tmp_path: Path, name: str, suffix: str) -> None:
    (tmp_path / f"{name}.{suffix.partition(':')[0]}").touch()
    reward = parse_reward(f"{name}={tmp_path}/{name}.{suffix}")
    assert read_settings(None, reward.settings)["name"] == name
