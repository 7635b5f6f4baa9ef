from pathlib import Path

import pytest

from flowfleet.job.files import RECIPES, prepare_job, recipe_names

JOB = """
[model]
path = "models/tiny"
[data]
train = "prompts.txt"
[rewards.ocr]
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file in project/jobs, the model in project, prompts in the current directory (elsewhere)."""
    for folder in ("project/jobs", "project/models/tiny", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "elsewhere/prompts.txt").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "project/jobs/job.toml"
    path.write_text(JOB)
    return path


def test_paths_are_found_here_then_beside_and_above_the_job_file(job_file: Path, tmp_path: Path) -> None:
    spec = prepare_job(job_file, same_machine=True)

    assert spec.data.train == str(tmp_path / "elsewhere/prompts.txt")
    assert spec.model.path == str(tmp_path / "project/models/tiny")


def test_paths_of_another_machine_stay_as_written(job_file: Path) -> None:
    assert prepare_job(job_file, same_machine=False).model.path == "models/tiny"


def test_a_path_found_nowhere_stays_as_written(job_file: Path) -> None:
    spec = prepare_job(job_file, ["model.path=no/such", "data.validation=https://host/x"], same_machine=True)

    assert spec.model.path == "no/such"
    assert spec.data.validation == "https://host/x"


def test_what_comes_with_the_package_is_found_from_anywhere_and_last(job_file: Path, tmp_path: Path) -> None:
    named = ["model.path=recipes/tiny/model"]
    assert prepare_job(job_file, named, same_machine=True).model.path == str(RECIPES / "tiny/model")
    assert prepare_job(job_file, named, same_machine=False).model.path == "recipes/tiny/model"
    outside = prepare_job(job_file, ["model.path=recipes/../flowfleet", "data.train=flowfleet"], same_machine=True)
    assert (outside.model.path, outside.data.train) == ("recipes/../flowfleet", "flowfleet")
    own = tmp_path / "project/recipes/tiny/model"
    own.mkdir(parents=True)
    assert prepare_job(job_file, named, same_machine=True).model.path == str(own)


def test_changes_are_read_as_toml_values_or_text(job_file: Path) -> None:
    changes = ["seed=7", "trainer.mode=full", "trainer.optimizer.betas=[0.8, 0.9]", 'name="x"', "data.train=a=b.txt"]
    spec = prepare_job(job_file, changes, same_machine=False)

    assert (spec.seed, spec.trainer.mode, spec.trainer.optimizer.betas) == (7, "full", (0.8, 0.9))
    assert (spec.name, spec.data.train) == ("x", "a=b.txt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("model.path.deep=1", "path is a value"),
        ("sede=3", "did you mean seed"),
        ("schedule.steps=none", r"schedule\.steps"),
    ],
)
def test_wrong_changes_say_what_to_write(job_file: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_job(job_file, [change], same_machine=True)


def test_the_shipped_recipes_are_valid() -> None:
    recipes = [RECIPES / f"{name}.toml" for name in recipe_names()]

    assert {path.stem for path in recipes} >= {
        "tiny_ocr",
        "tiny_ocr_full",
        "qwen_image_ocr_lora",
        "qwen_image_ocr_full",
    }
    for path in recipes:
        assert prepare_job(path, same_machine=True).data_files


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert prepare_job(Path(name), same_machine=True) == prepare_job(RECIPES / f"{name}.toml", same_machine=True)


def test_a_recipe_is_found_by_its_path_where_there_is_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = prepare_job(Path("recipes/tiny_ocr.toml"), same_machine=True)
    assert found == prepare_job(RECIPES / "tiny_ocr.toml", same_machine=True)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/tiny_ocr.toml").write_text(JOB)
    assert prepare_job(Path("recipes/tiny_ocr.toml"), same_machine=True).data.train == "prompts.txt"


def test_a_file_goes_before_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_ocr.toml").write_text(JOB)

    assert prepare_job(Path("tiny_ocr.toml"), same_machine=False).model.path == "models/tiny"


def test_a_recipe_goes_before_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers/flow_grpo_sd35_ocr").mkdir(parents=True)

    assert prepare_job(Path("papers/flow_grpo_sd35_ocr"), same_machine=True).name == "flow-grpo-sd35-ocr"


def test_a_wrong_name_lists_similar_ones() -> None:
    with pytest.raises(ValueError, match=r"tiny_orc: .* no recipe of this name: did you mean tiny_ocr"):
        prepare_job(Path("tiny_orc"), same_machine=True)
    with pytest.raises(ValueError, match=r"recipes are .*qwen_image_ocr_lora, "):
        prepare_job(Path("zzz"), same_machine=True)
    with pytest.raises(ValueError, match="cannot be read"):
        prepare_job(Path("papers/tiny_ocr.toml"), same_machine=True)
