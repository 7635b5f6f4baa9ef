"""Every reader of a model's folder takes the same tensors, or refuses the folder in the same words."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowfleet.job.spec import parse_job
from flowfleet.models import loading, weight_files
from flowfleet.models.files import WeightFiles
from flowfleet.models.registry import FAMILIES, ModelFamily, adapter_for, family_of
from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.models.weight_files import FLAT, PIPELINE, TRANSFORMERS, Layout, check_model
from flowfleet.planning.plan import predict
from services.controller.jobs.submission.model_checks import weight_problems
from services.controller.prompts.sources import Sources
from services.controller.reading.places import Places
from services.trainer.model.kinds import TransformersSource

AGAIN = "download or copy the model again"
Damage = Callable[[Path, str], object]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def single(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.safetensors"


def in_shards(folder: Path, stem: str, *, index: bool = True) -> list[Path]:
    """Puts two shards in place of the one file."""
    state = load_file(single(folder, stem))
    single(folder, stem).unlink()
    names, files, places = sorted(state), list[Path](), dict[str, str]()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        files.append(folder / f"{stem}-{number:05d}-of-00002.safetensors")
        save_file({name: state[name] for name in part}, files[-1], {"format": "pt"})
        places |= dict.fromkeys(part, files[-1].name)
    if index:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def other(file: Path) -> dict[str, torch.Tensor]:
    return {name: tensor + 7 for name, tensor in load_file(file).items()}


def both(folder: Path, stem: str) -> None:
    sevens = other(single(folder, stem))
    in_shards(folder, stem)
    save_file(sevens, single(folder, stem), {"format": "pt"})


def stray(folder: Path, stem: str) -> None:
    save_file(other(single(folder, stem)), folder / f"{stem}-00001-of-00003.safetensors", {"format": "pt"})


def stray_of_more(folder: Path, stem: str) -> None:
    save_file(other(single(folder, stem)), folder / f"{stem}-00003-of-00003.safetensors", {"format": "pt"})
    in_shards(folder, stem)


def twice(folder: Path, stem: str) -> None:
    files = in_shards(folder, stem)
    name, tensor = next(iter(load_file(files[0]).items()))
    save_file({**load_file(files[1]), name: tensor + 7}, files[1], {"format": "pt"})


def misplaced(folder: Path, stem: str) -> None:
    files = in_shards(folder, stem)
    files[0].rename(folder / "a")
    files[1].rename(files[0])
    (folder / "a").rename(files[1])


def empty_index(folder: Path, stem: str) -> None:
    in_shards(folder, stem)
    (folder / f"{stem}.safetensors.index.json").write_text("{}")


def cut(folder: Path, stem: str) -> None:
    file = single(folder, stem)
    file.write_bytes(file.read_bytes()[:-5])


def pointer(folder: Path, stem: str) -> None:
    single(folder, stem).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "both": (both, "loaders differ in which of them they read"),
    "stray": (stray, "loaders differ in which of them they read"),
    "stray of more": (stray_of_more, "loaders differ in which of them they read"),
    "twice": (twice, "has .* in .*-00001-of-00002.safetensors and in .*-00002"),
    "misplaced": (misplaced, "where its index says it is"),
    "empty index": (empty_index, "it has no weight_map"),
    "no index": (lambda folder, stem: in_shards(folder, stem, index=False), "have no .*index.json"),
    "missing shard": (lambda folder, stem: in_shards(folder, stem)[1].unlink(), "lacks 1 of 2 files .*00002-of-00002"),
    "only fp16": (
        lambda folder, stem: single(folder, stem).rename(folder / f"{stem}.fp16.safetensors"),
        r"only a variant, .*\.fp16\.safetensors",
    ),
    "cut": (cut, "is not a whole file of safetensors"),
    "pointer": (pointer, "is not a whole file of safetensors"),
    "nothing": (lambda folder, stem: single(folder, stem).unlink(), "has no weights: .*safetensors is not there"),
}
PARTS = {"transformer": "diffusion_pytorch_model", "text_encoder": "model", "vae": "diffusion_pytorch_model"}


def submitted(model: Path) -> str:
    """What a submit says of a folder; empty where it accepts it."""
    spec = parse_job({"model": {"path": str(model)}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})
    sources = Sources(Places.of([model], [], model / "state"))
    return "".join(weight_problems(spec, family_of(model), sources)).removeprefix("model.path: ")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_pipeline_that_cannot_be_loaded_in_one_way_is_refused_everywhere_in_the_same_words(
    damage: str, part: str, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    assert submitted(model) == ""
    spoil, words = DAMAGES[damage]
    spoil(model / part, PARTS[part])
    said = submitted(model)
    with pytest.raises(ValueError, match=words) as refused:
        check_model(model, PIPELINE)
    assert str(refused.value) == said
    with pytest.raises(ValueError, match=words) as refused:
        adapter_for(model).load(model, dtype=torch.float32)
    assert said in str(refused.value)
    if part == "transformer":
        with pytest.raises(ValueError, match=words) as refused:
            WeightFiles(model / part)
        assert said == str(refused.value)
        spec = parse_job({"model": {"path": str(model)}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})
        with pytest.raises(ValueError, match=words) as refused:
            predict(spec)
        assert said == str(refused.value)


@pytest.mark.parametrize("part", ["tokenizer", "scheduler", "vae"])
def test_a_part_without_its_folder_is_refused_at_submit(part: str, tiny_qwen_image: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    shutil.rmtree(model / part)
    assert f"{model} has no folder {part}, which its model_index.json lists" in submitted(model)


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("layout", [None, FLAT])
def test_a_plugins_layout_that_its_adapter_alone_knows_is_taken_at_submit(
    layout: Layout | None, modality: Literal["image", "text"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "Own", ModelFamily("Own", "Own", "own:Own", modality=modality, layout=layout))
    (tmp_path / "config.json").write_text('{"architectures": ["Own"]}')
    save_file({"w": torch.ones(1)}, tmp_path / "own.safetensors")
    assert submitted(tmp_path) == (
        "" if layout is None else f"{tmp_path} has no weights: model.safetensors is not there; {AGAIN}"
    )
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert submitted(tmp_path) == ""
    (tmp_path / "config.json").unlink()
    (tmp_path / "model_index.json").write_text('{"_class_name": "Own", "vae": ["diffusers", "AutoencoderKL"]}')
    assert ("has no folder vae" in submitted(tmp_path)) == (layout is None)


def test_what_plugins_imported_with_the_loaders_is_still_there() -> None:
    for name in ("PIPELINE", "TRANSFORMERS", "Layout", "weight_files", "refuse_pickles"):
        assert getattr(loading, name) is getattr(weight_files, name)


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "text")
    return tmp_path / "text"


def hashes_by_readers(folder: Path) -> list[dict[str, str]]:
    """Hashes of what each reader loads, by the names of the model's parameters."""
    adapter: type[SequenceAdapter] = family_of(folder).load(writes_tokens=True)
    rollout = adapter.load(folder, dtype=torch.float32, components=("transformer",)).transformer
    trainer, files = TransformersSource(folder, TRANSFORMERS), WeightFiles(folder, TRANSFORMERS)
    parameters: dict[str, nn.Parameter] = dict(rollout.named_parameters())
    read = (
        {name: parameter.detach() for name, parameter in parameters.items()},
        {name: trainer.rows(name, parameter.shape, slice(None)) for name, parameter in parameters.items()},
        {name: files.tensor(name) for name in parameters},
    )
    return [{name: digest(tensor) for name, tensor in tensors.items()} for tensors in read]


def test_all_readers_load_the_same_tensors_of_a_whole_model_and_of_its_shards(text_model: Path) -> None:
    whole = hashes_by_readers(text_model)
    in_shards(text_model, "model")
    assert [whole[0]] * 6 == [*whole, *hashes_by_readers(text_model)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_writes_text_is_refused_by_every_reader(damage: str, text_model: Path) -> None:
    spoil, words = DAMAGES[damage]
    spoil(text_model, "model")
    adapter: type[SequenceAdapter] = family_of(text_model).load(writes_tokens=True)
    with pytest.raises(ValueError, match=words) as refused:
        adapter.load(text_model, dtype=torch.float32, components=("transformer",))
    said = str(refused.value)
    with pytest.raises(ValueError, match=words):
        TransformersSource(text_model, TRANSFORMERS)
    assert submitted(text_model) in said


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "consolidated.safetensors", "adapter_config.json"])
def test_a_text_model_has_nothing_beside_it_that_some_engine_would_read(name: str, text_model: Path) -> None:
    """vLLM reads every safetensors file of the folder, and transformers puts an adapter on top."""
    if name.endswith("json"):
        (text_model / name).write_text("{}")
    else:
        save_file(other(single(text_model, "model")), text_model / name)
    assert ("give it as model.adapter" if name.endswith("json") else "loaders differ") in submitted(text_model)


def test_an_output_layer_beside_tied_embeddings_is_refused(text_model: Path) -> None:
    """transformers and vLLM differ in which they take."""
    config = json.loads((text_model / "config.json").read_text())
    (text_model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    adapter: type[SequenceAdapter] = family_of(text_model).load(writes_tokens=True)
    empty = adapter.load(text_model, dtype=torch.float32, components=("transformer",), load_format="empty")
    with pytest.raises(ValueError, match=r"holds another lm_head\.weight"):
        TransformersSource(text_model, TRANSFORMERS).check(empty.transformer)


def test_a_variant_beside_a_pipelines_weights_is_not_read(tiny_qwen_image: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    file = single(model / "transformer", PARTS["transformer"])
    expected = {name: digest(tensor) for name, tensor in load_file(file).items()}
    save_file(other(file), file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    assert submitted(model) == ""
    loaded = adapter_for(model).load(model, dtype=torch.float32).transformer
    files = WeightFiles(model / "transformer")
    for name, parameter in loaded.named_parameters():
        assert digest(parameter.detach()) == digest(files.tensor(name)) == expected[name]


def test_sigmas_that_need_scipy_are_refused_where_it_is_not(
    tiny_qwen_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_qwen_image, tmp_path / "model")
    file = model / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_beta_sigmas": True}))
    monkeypatch.setattr(weight_files, "find_spec", lambda name: None)
    assert "needs scipy: install it" in submitted(model)
    monkeypatch.setattr(weight_files, "find_spec", lambda name: name)
    assert submitted(model) == ""
