"""The adapter on real tiny transformers: injection, names, blob, switch; one transformer and two experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from torch import nn

from flowfleet.errors import DataLoss
from flowfleet.models.registry import adapter_for
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights import lora
from flowfleet.weights.weights import full_parameters
from tests.tiny_models import make_tiny

SPEC = LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", "to_k", "add_q_proj", "to_out.0", "img_mlp.net.2"])
BOTH = LoraSpec(rank=2, alpha=4.0, target_modules=["to_q", "ffn.net.2"])


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("wan_two_experts", tmp_path_factory.mktemp("models") / "two-experts")


def load_experts(path: Path) -> dict[str, nn.Module]:
    return adapter_for(path).load(path, dtype=torch.float32, components=("transformer",)).experts


def forward(experts: dict[str, nn.Module]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        output: torch.Tensor = experts["transformer"](
            hidden_states=torch.randn(2, 4, 64, generator=generator),
            encoder_hidden_states=torch.randn(2, 6, 32, generator=generator),
            timestep=torch.tensor([0.5, 0.7]),
            img_shapes=[[(1, 2, 2)]] * 2,
            return_dict=False,
        )[0]
        return output


def forward_two(experts: dict[str, nn.Module]) -> list[torch.Tensor]:
    """Runs each expert on the same random input."""
    generator = torch.Generator().manual_seed(0)
    latents, prompts = torch.randn(1, 16, 1, 4, 4, generator=generator), torch.randn(1, 6, 32, generator=generator)
    with torch.no_grad():
        return [
            module(
                hidden_states=latents, encoder_hidden_states=prompts, timestep=torch.tensor([900.0]), return_dict=False
            )[0]
            for module in experts.values()
        ]


def perturb(parameters: dict[str, nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(9)
    for parameter in parameters.values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_adapter_round_trip_and_switch(tiny_qwen_image: Path) -> None:
    plain = forward(load_experts(tiny_qwen_image))
    sender, replica = load_experts(tiny_qwen_image), load_experts(tiny_qwen_image)
    parameters = lora.install_lora(sender, SPEC, seed=1)
    lora.install_lora(replica, SPEC, seed=2)
    assert torch.equal(forward(sender), plain)
    trained = {name for name, parameter in sender["transformer"].named_parameters() if parameter.requires_grad}
    assert trained == {name.removeprefix("transformer.").replace(".weight", ".default.weight") for name in parameters}
    perturb(parameters)
    assert not torch.allclose(forward(sender), plain, atol=1e-3)
    names = lora.load_adapter(replica, lora.adapter_from_bytes(lora.adapter_to_bytes(parameters)))
    assert set(names) == set(parameters)
    assert torch.equal(forward(replica), forward(sender))
    with lora.adapter_disabled(sender):
        assert torch.equal(forward(sender), plain)
    assert torch.equal(forward(replica), forward(sender))
    assert all(parameter.requires_grad for parameter in parameters.values())


def test_start_depends_on_the_seed_alone(tiny_qwen_image: Path) -> None:
    first, same, other = (
        lora.install_lora(load_experts(tiny_qwen_image), SPEC, seed=seed, dtype=torch.float32) for seed in (5, 5, 6)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, other[name]) == (".lora_B." in name)


def test_names_are_those_of_diffusers(tiny_qwen_image: Path, tmp_path: Path) -> None:
    sender = load_experts(tiny_qwen_image)
    parameters = lora.install_lora(sender, SPEC, seed=1)
    perturb(parameters)
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(lora.adapter_to_bytes(parameters))
    pipeline: Any = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    pipeline.load_lora_weights(tmp_path)
    loaded = {name for name, _ in pipeline.transformer.named_parameters() if ".lora_" in name}
    assert len(loaded) == len(parameters)


def test_what_does_not_fit_is_refused(tiny_qwen_image: Path) -> None:
    experts = load_experts(tiny_qwen_image)
    with pytest.raises(ValueError, match="no module 'to_x'"):
        lora.install_lora(experts, LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", "to_x"]))
    parameters = dict(lora.install_lora(experts, SPEC))
    first = next(iter(parameters))
    with pytest.raises(ValueError, match="unexpected"):
        lora.load_adapter(experts, {**parameters, "transformer.more": torch.zeros(1)})
    del parameters[first]
    with pytest.raises(ValueError, match="missing"):
        lora.load_adapter(experts, parameters)
    with pytest.raises(DataLoss, match="cannot be read"):
        lora.adapter_from_bytes(b"not safetensors")


def test_both_experts_are_adapted_published_switched_and_cleared(two_experts: Path) -> None:
    sender, replica = load_experts(two_experts), load_experts(two_experts)
    assert list(sender) == ["transformer", "transformer_2"]
    plain = forward_two(sender)
    assert not torch.equal(*plain)
    parameters = lora.install_lora(sender, BOTH, seed=1)
    lora.install_lora(replica, BOTH, seed=2)
    halves = [[name for name in parameters if name.startswith(f"{component}.")] for component in sender]
    assert len(halves[0]) == len(halves[1]) == len(parameters) / 2
    assert {name.replace("transformer_2.", "transformer.", 1) for name in halves[1]} == set(halves[0])
    starts = [parameters[half[0]] for half in halves]
    assert not torch.equal(*starts)  # One generator draws for both.
    perturb(parameters)
    adapted = forward_two(sender)
    for before, after in zip(plain, adapted, strict=True):
        assert not torch.allclose(before, after, atol=1e-3)
    lora.load_adapter(replica, lora.adapter_from_bytes(lora.adapter_to_bytes(parameters)))
    assert all(map(torch.equal, forward_two(replica), adapted))
    with lora.adapter_disabled(replica):
        assert all(map(torch.equal, forward_two(replica), plain))
    with pytest.raises(ValueError, match="missing"):
        lora.load_adapter(replica, {name: parameters[name] for name in halves[0]})
    lora.remove_lora(replica)
    assert all(map(torch.equal, forward_two(replica), plain))
    assert not lora.named_adapter_parameters(replica)


def test_full_weights_of_two_experts_have_names_of_their_own(two_experts: Path) -> None:
    experts = load_experts(two_experts)
    named = full_parameters(experts)
    assert len(named) == sum(len(list(module.parameters())) for module in experts.values())
    assert named["transformer_2.patch_embedding.weight"] is experts["transformer_2"].get_parameter(
        "patch_embedding.weight"
    )
