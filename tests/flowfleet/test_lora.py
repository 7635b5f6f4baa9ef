"""The adapter on a real tiny transformer: injection, names, blob, switch."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from flowfleet import lora
from flowfleet.errors import DataLoss
from flowfleet.jobs import QWEN_LORA_TARGETS
from flowfleet.proto.rollout_pb2 import LoraSpec

SPEC = LoraSpec(rank=4, alpha=8.0, target_modules=QWEN_LORA_TARGETS)


def load_transformer(path: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(path, subfolder="transformer")


def forward(model: QwenImageTransformer2DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return model(
            hidden_states=torch.randn(2, 4, 64, generator=generator),
            encoder_hidden_states=torch.randn(2, 6, 32, generator=generator),
            timestep=torch.tensor([0.5, 0.7]),
            img_shapes=[[(1, 2, 2)]] * 2,
            return_dict=False,
        )[0]


def perturb(parameters: dict[str, torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(9)
    for parameter in parameters.values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_adapter_round_trip_and_switch(tiny_qwen_image: Path) -> None:
    plain = forward(load_transformer(tiny_qwen_image))
    sender, replica = load_transformer(tiny_qwen_image), load_transformer(tiny_qwen_image)
    parameters = lora.install_lora(sender, SPEC, seed=1)
    lora.install_lora(replica, SPEC, seed=2)
    assert torch.equal(forward(sender), plain)
    assert {name for name, parameter in sender.named_parameters() if parameter.requires_grad} == {
        name.removeprefix("transformer.").replace(".weight", ".default.weight") for name in parameters
    }
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
        lora.install_lora(load_transformer(tiny_qwen_image), SPEC, seed=seed, dtype=torch.float32) for seed in (5, 5, 6)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, other[name]) == (".lora_B." in name)


def test_names_are_those_of_diffusers(tiny_qwen_image: Path, tmp_path: Path) -> None:
    sender = load_transformer(tiny_qwen_image)
    parameters = lora.install_lora(sender, SPEC, seed=1)
    perturb(parameters)
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(lora.adapter_to_bytes(parameters))
    pipeline = QwenImagePipeline.from_pretrained(tiny_qwen_image)
    pipeline.load_lora_weights(tmp_path)
    loaded = {name for name, _ in pipeline.transformer.named_parameters() if ".lora_" in name}
    assert len(loaded) == len(parameters)


def test_what_does_not_fit_is_refused(tiny_qwen_image: Path) -> None:
    model = load_transformer(tiny_qwen_image)
    with pytest.raises(ValueError, match="no module 'to_x'"):
        lora.install_lora(model, LoraSpec(rank=4, alpha=8.0, target_modules=["to_q", "to_x"]))
    parameters = dict(lora.install_lora(model, SPEC))
    first = next(iter(parameters))
    with pytest.raises(ValueError, match="unexpected"):
        lora.load_adapter(model, {**parameters, "transformer.more": torch.zeros(1)})
    del parameters[first]
    with pytest.raises(ValueError, match="missing"):
        lora.load_adapter(model, parameters)
    with pytest.raises(DataLoss, match="cannot be read"):
        lora.adapter_from_bytes(b"not safetensors")
