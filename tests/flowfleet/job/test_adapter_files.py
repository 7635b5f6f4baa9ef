"""An adapter that is not base + alpha / rank · B·A is refused; every other one is what PEFT makes of it."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowfleet.job.adapter_files import find_adapter

ODD: dict[str, list[Any]] = {
    "alpha_pattern": [{"to_q": 16}],
    "rank_pattern": [{"to_q": 2}],
    "modules_to_save": [["to_k"]],
    "exclude_modules": [["to_k"]],
    "layers_to_transform": [[0], 0],
    "target_modules": [["to_q"], ".*to_q", "all-linear"],
    "layer_replication": [[(0, 1)]],
    "trainable_token_indices": [[1]],
    "target_parameters": [["to_k.weight"]],
    "alora_invocation_tokens": [[1]],
    "megatron_config": [{"tensor": 1}],
    "velora_config": [{"rank": 1}],
    "init_lora_weights": [True, False, "gaussian", "eva", "olora", "pissa", "pissa_niter_4", "loftq", "orthogonal",
                          "corda", "lora_ga", "mica"],
    "bias": ["all", "lora_only"],
    "r": [2, 6],
    "lora_alpha": [1, 3.5],
    "lora_dropout": [0.5],
    "inference_mode": [True],
    "revision": ["main"],
}  # fmt: skip
"""Values besides a field's default; a field that is not here has the opposite of its default, or a table."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.ModuleDict({"to_q": nn.Linear(8, 8), "to_k": nn.Linear(8, 8)}) for _ in range(2))
        self.body = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in typing.cast(nn.ModuleList, self.body["layers"]):
            parts = typing.cast(nn.ModuleDict, layer)
            x = parts["to_k"](torch.tanh(parts["to_q"](x)))
        return x


def values(field: dataclasses.Field[Any]) -> list[Any]:
    if field.name in ODD:
        return ODD[field.name]
    return [not field.default] if isinstance(field.default, bool) else [{"a": 1}] if field.default is None else ["x"]


CASES = [
    (field.name, value)
    for field in dataclasses.fields(LoraConfig)
    if field.name not in ("runtime_config", "peft_type", "task_type", "auto_mapping", "peft_version")
    for value in values(field)
]


def written(folder: Path, name: str, value: Any) -> tuple[Model, LoraConfig | None]:
    """A trained adapter of PEFT's with one other setting; where PEFT cannot make it here, a plain one whose file says
    so."""
    torch.manual_seed(0)
    known: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k"]}
    base = Model()
    made = Model()
    made.load_state_dict(base.state_dict())
    try:
        config = LoraConfig(**{**known, name: value})
        peft: Any = get_peft_model(made, config)
    except Exception:
        config = None
        peft = get_peft_model(Model(), LoraConfig(**known))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    peft.save_pretrained(folder)
    if config is None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    return base, config


def by_hand(base: Model, folder: Path, x: Tensor) -> Tensor:
    """What A, B, rank and alpha say, on the plain base."""
    tensors = load_file(folder / "adapter_model.safetensors")
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    parameters = dict(base.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                weight = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                parameters[weight].add_(alpha / len(a) * tensors[name.replace("lora_A", "lora_B")] @ a)
        computed: Tensor = base(x)
    return computed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_every_value_of_every_setting_of_pefts_is_refused_or_computes_the_same(
    name: str, value: Any, tmp_path: Path
) -> None:
    base, config = written(tmp_path, name, value)
    refused = ""
    try:
        find_adapter(tmp_path)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "merge_and_unload" in refused
        return
    if config is None:  # PEFT itself makes no such adapter of this model; it must be one that changes nothing
        assert name in ("corda_config", "eva_config", "lora_ga_config", "loftq_config", "layers_pattern")
        return
    x = torch.randn(3, 8)
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(Model(), str(tmp_path))
    with torch.no_grad():
        expected = again.eval()(x)
    torch.testing.assert_close(by_hand(base, tmp_path, x), expected)


@pytest.mark.parametrize(
    ("setting", "value"), [("use_dora", True), ("use_rslora", True), ("init_lora_weights", "pissa"), ("unheard", 3)]
)
def test_a_file_of_diffusers_is_judged_by_its_metadata(setting: str, value: Any, tmp_path: Path) -> None:
    file, tensors = tmp_path / "pytorch_lora_weights.safetensors", {"transformer.to_q.lora_A.weight": torch.zeros(2, 2)}
    settings = {"transformer.r": 2, "transformer.init_lora_weights": True}
    for added in ({}, {f"transformer.{setting}": value}):
        save_file(tensors, file, {"lora_adapter_metadata": json.dumps(settings | added)})
        if added:
            with pytest.raises(ValueError, match=rf"{setting} = .*fuse_lora"):
                find_adapter(tmp_path)
        else:
            find_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("transformer.to_q.lora_magnitude_vector", "merge it"),
        ("text_encoder.to_q.lora_A.weight", "merge it"),
        ("transformer.to_q.hada_w1_a", "merge it"),
        ("lora_unet_to_q.lora_down.weight", "write it with save_lora_weights"),
    ],
)
def test_no_advice_leads_back(name: str, advice: str, tmp_path: Path) -> None:
    """What diffusers would write again as it is, is to be merged."""
    save_file({name: torch.ones(2, 2)}, tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match=advice):
        find_adapter(tmp_path)
