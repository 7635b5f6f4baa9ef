"""A table in place of layers that read the noise level: their own bits, read once, and nothing of them kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowfleet.models import level_tables
from flowfleet.models.base import ModelAdapter
from flowfleet.models.level_tables import Pick, table_of
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from tests.tiny_models import make_tiny

SIZE = Size(32, 48)
TIMESTEPS = torch.tensor([1000.0, 741.3, 250.0])
Asked = list[str]


@pytest.fixture(params=["qwen_image", "qwen_image_edit", "qwen_image_edit_2511"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny(request.param, tmp_path / "model")


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> ModelAdapter:
    return adapter_for(path).load(path, dtype=dtype, components=("transformer",))


def with_table(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelAdapter, Asked]:
    adapter, asked = loaded(path, dtype), Asked()
    own = dict(adapter.transformer.named_parameters())

    def weights(name: str, shape: Sequence[int]) -> Tensor:
        asked.append(name)
        assert own[name].shape == tuple(shape)
        return own[name].detach()

    assert adapter.level_layers is not None
    level_tables.install(adapter.transformer, adapter.level_layers, weights)
    return adapter, asked


def prompts_of(adapter: ModelAdapter, count: int) -> Any:
    return adapter.blank_prompts(count, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_the_layers_own_outputs_of_one_row_bit_for_bit(path: Path, dtype: torch.dtype) -> None:
    plain, (adapter, asked) = loaded(path, dtype), with_table(path, dtype)
    table = table_of(adapter.transformer)
    assert table is not None
    assert table_of(plain.transformer) is None
    adapter.expect_levels(TIMESTEPS)
    num_layers = len(plain.transformer.transformer_blocks)
    assert len(asked) == len(set(asked)) == 2 * (2 * num_layers + 1)
    for timestep in TIMESTEPS:
        (rows,) = table.rows(timestep)
        level = (timestep / 1000).to(dtype)[None]
        embedded = plain.transformer.time_text_embed(level, torch.empty(0, dtype=dtype))
        for number, block in enumerate(plain.transformer.transformer_blocks):
            for part, layer in enumerate((block.img_mod, block.txt_mod)):
                assert torch.equal(rows[2 * number + part], layer(embedded)[0])
        norm = plain.transformer.norm_out
        assert torch.equal(rows[-1, : len(norm.linear.bias)], norm.linear(norm.silu(embedded))[0])
    assert len(asked) == 2 * (2 * num_layers + 1)


def test_velocities_are_those_of_the_layers(path: Path) -> None:
    plain, (adapter, _) = loaded(path), with_table(path)
    latents = plain.initial_latents([1, 2, 3], SIZE)
    for rows, timestep in ((3, TIMESTEPS), (3, TIMESTEPS[1]), (1, TIMESTEPS[2])):
        expected, found = (
            it.velocity(latents[:rows], timestep, prompts_of(it, rows), size=SIZE) for it in (plain, adapter)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_both_branches_of_guidance_in_one_forward_have_the_levels_of_their_rows(tmp_path: Path) -> None:
    from flowfleet.models.settings import Guidance

    adapter, _ = with_table(make_tiny("qwen_image", tmp_path / "model"))
    latents, prompts = adapter.initial_latents([1, 2, 3], SIZE), prompts_of(adapter, 3)
    found = []
    for joins in (False, True):
        adapter.joins_branches = joins
        given: dict[str, Any] = {"size": SIZE, "guidance": Guidance(4.0), "negative": prompts_of(adapter, 1)}
        found.append(adapter.velocity(latents, TIMESTEPS, prompts, **given))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_the_layers_weights_are_gone_and_the_rest_stays(path: Path) -> None:
    plain, (adapter, _) = loaded(path), with_table(path)
    assert adapter.level_layers is not None
    names = adapter.level_layers.names(plain.transformer)
    assert adapter.level_layers.names(adapter.transformer) == names
    before, after = (set(dict(it.transformer.named_parameters())) for it in (plain, adapter))
    assert before - after == {f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")}
    assert after < before
    assert all(isinstance(adapter.transformer.get_submodule(name), Pick) for name in names)


def test_levels_that_surprise_again_are_all_computed_at_once(tmp_path: Path) -> None:
    adapter, asked = with_table(make_tiny("qwen_image", tmp_path / "model"), torch.bfloat16)
    table = table_of(adapter.transformer)
    assert table is not None
    table.rows(torch.tensor(500.0))
    first = len(asked)
    table.rows(torch.tensor([20.0, 900.0]))
    assert len(asked) == 2 * first
    every = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 980 + 20
    assert table.rows(every).shape[0] == 200
    table.rows(torch.tensor(500.4))  # rounds to the level of 500
    assert len(asked) == 2 * first
    table.rows(torch.tensor(1.0))
    assert len(asked) == 3 * first


def test_an_adapter_that_trains_such_a_layer_keeps_it(path: Path) -> None:
    adapter = loaded(path)
    layers = adapter.level_layers
    assert layers is not None
    assert layers.fit(adapter.transformer, adapter.lora_targets)
    for target in ("img_mod.1", "linear", "transformer_blocks.0.txt_mod.1"):
        assert not layers.fit(adapter.transformer, ["to_q", target])


def test_an_embedding_with_further_conditions_has_no_table(tmp_path: Path) -> None:
    adapter = loaded(make_tiny("qwen_image", tmp_path / "model"))
    adapter.transformer.time_text_embed.use_additional_t_cond = True
    assert adapter.level_layers is not None
    assert adapter.level_layers.names(adapter.transformer) == []
    assert not adapter.level_layers.fit(adapter.transformer, [])


def test_compiled_blocks_share_their_code(tmp_path: Path) -> None:
    adapter, _ = with_table(make_tiny("qwen_image", tmp_path / "model"))
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    blocks = adapter.transformer.transformer_blocks
    assert isinstance(blocks, nn.ModuleList)
    assert len(blocks) > 1
    for block in blocks:
        block.compile(backend=backend)
    with torch.no_grad():
        adapter.velocity(adapter.initial_latents([1], SIZE), TIMESTEPS[0], prompts_of(adapter, 1), size=SIZE)
    assert len(compiled) == 1
    torch._dynamo.reset()
