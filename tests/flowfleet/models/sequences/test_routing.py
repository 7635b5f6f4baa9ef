"""Routers of mixtures: which are replayed, which are refused by name, and what their records hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from flowfleet.models.sequences.routing import Routing

WIDTH, TOKENS = 32, 40


def config(num_experts: int = 8, **changes: Any) -> Any:
    sizes = {"num_experts": num_experts, "num_local_experts": num_experts, "num_experts_per_tok": 2, "top_k_experts": 2}
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6}
    return SimpleNamespace(**{"hidden_size": WIDTH, "norm_topk_prob": True, **sizes, **groups, **changes})


def routed(router: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Routing, Any]:
    """The routing of a model with this one router, and its forward on random tokens."""
    generator = torch.Generator().manual_seed(0)
    for parameter in router.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * (2 / WIDTH**0.5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    extra = (torch.zeros(8),) if isinstance(router, MiniMaxM2TopKRouter) else ()
    return Routing(nn.ModuleDict({"layers": nn.ModuleList([router])})), lambda: router(hidden, *extra)


def first_experts() -> Tensor:
    return torch.tensor([0, 1]).expand(TOKENS, 1, 2).to(torch.uint8)


class UnscaledTopKRouter(MixtralTopKRouter):  # type: ignore[misc]
    """A softmax that is not normalized among the chosen."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, indices = super().forward(hidden)
        return logits, logits.softmax(-1).gather(-1, indices), indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalizes", [True, False])
def test_a_softmax_over_all_experts_is_recorded_and_replayed(dtype: torch.dtype, normalizes: bool) -> None:
    router = Qwen3MoeTopKRouter(config(norm_topk_prob=normalizes))
    routing, forward = routed(router, dtype)
    with routing.recording() as layers:
        logits, scores, indices = forward()
    assert torch.equal(layers[0][0], indices)
    routing.replay([indices[:, None]], [TOKENS])
    assert torch.equal(forward()[1], scores)
    routing.replay([first_experts()], [TOKENS])
    expected = logits.double().softmax(-1)[:, :2]
    expected = expected / expected.sum(-1, keepdim=True) if normalizes else expected
    torch.testing.assert_close(forward()[1].double(), expected, atol=0, rtol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "router", [MiniMaxM2TopKRouter(config()), DeepseekV3TopkRouter(config()), UnscaledTopKRouter(config())]
)
def test_routers_that_score_in_another_way_are_refused_by_name(router: nn.Module) -> None:
    """Sigmoids, and a softmax that is not normalized though no attribute says so, as Jamba's."""
    name = type(router).__name__
    routing, forward = routed(router)
    assert (routing.num_layers, routing.layers, routing.top_k, routing.num_experts) == (1, (0,), 2, 8)
    forward()  # without replay its model is used as it is
    with (
        pytest.raises(ValueError, match=rf"{name} .* set rollout\.sequence\.routed_experts = false"),
        routing.recording(),
    ):
        forward()
    routing.replay([first_experts()], [TOKENS])
    with pytest.raises(ValueError, match=rf"{name} does not score"):
        forward()
    routing.replay([], [])
    forward()


def test_a_router_without_the_usual_attributes_does_not_look_dense() -> None:
    routing, forward = routed(Gemma4TextRouter(config()))
    assert routing.num_layers == 1
    with pytest.raises(ValueError, match="Gemma4TextRouter does not score"), routing.recording():
        forward()


class ForgetGate(nn.Linear):
    """A gate that chooses no experts."""


def test_gates_that_choose_no_experts_are_none_of_a_mixture() -> None:
    assert Routing(nn.ModuleList([ForgetGate(2, 2)])).num_layers == 0


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_records_have_the_type_that_the_models_experts_need(num_experts: int, dtype: torch.dtype) -> None:
    """Whatever experts were taken, so that a job's records have one type."""
    routing = Routing(nn.ModuleList([MixtralTopKRouter(config(num_experts))]))
    for experts in (torch.tensor([[0, 1]]), torch.tensor([[0, num_experts - 1]])):
        packed = routing.packed(experts)
        assert packed.dtype is dtype
        assert torch.equal(packed.long(), experts)
