"""Which algorithms, reverse steps and losses there are, and what goes with what. Free of torch, for the controller.

An algorithm is a name for a combination: a reverse step, a window, a loss and an advantage, each of which a job may
still choose itself. A step is a formula that rollout and trainer evaluate, a loss a function that the trainer calls and
a model of its settings. A new one is that function and one `register_step` or `register_loss`, in
flowfleet/algorithms/builtin or in a plugin (flowfleet/plugins.py). A new algorithm is a table of algorithms.toml there,
or one `register_algorithm` of a plugin. docs/extending.md shows each.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from flowfleet.algorithms import settings
from flowfleet.algorithms.kinds import KINDS, Kind, add, imported
from flowfleet.algorithms.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Step:
    """A reverse step with noise, and what it allows."""

    name: str
    formula: str
    """"module:function", a `StepFormula` of flowfleet/algorithms/sde.py."""
    is_gaussian: bool = True
    """Its log-prob is that of the Gaussian it draws from; if not, the bare squared distance to the mean."""
    max_eta: float | None = None
    """The greatest noise level that has a meaning; None: any."""
    noise_at_end: bool = True
    """Adds noise even in the step that ends at sigma 0."""

    def load(self) -> Callable[..., Any]:
        """Imports the formula; needs torch."""
        return imported(self.formula)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and what it needs of the rest."""

    name: str
    function: str
    """"module:function", of the type that the objective of its kind calls: `PolicyLoss`, `MatchingLoss`, …"""
    kind: str
    """Name of its kind (flowfleet/algorithms/kinds.py)."""
    reads: tuple[str, ...] = ()
    """Without `settings`: names of Flowfleet's own settings that this loss reads besides those of its kind."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings of other parts of the job to values that suit this loss better than the schema's. Without
    `settings`, names of its own too."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Without `settings`: the greatest value of a setting that makes sense for this loss."""
    settings: type[LossSettings] | None = None
    """Its table `[algorithm]`: what it reads, with defaults, bounds and descriptions. Unset: what its kind reads, and
    `reads`."""
    needs_old_mean: bool = False
    """Reads the old policy's means, which rollouts do not store."""
    needs_gaussian: bool = False
    """Its formula holds for Gaussian log-probs alone, so not with `cps`."""
    by_sequence: bool = False
    """Has one ratio for all tokens of a sequence."""
    needs_pairs: bool = False
    """Trains on pairs of a better and a worse sample, by one noise each."""
    needs_groups: bool = False
    """Compares the samples of a group: each micro-batch holds whole groups."""
    shares_noise: bool = False
    """Trains the samples of a group at one noise level by one noise."""
    needs_reference: bool = False
    """Compares with the model before training."""
    from_steps: bool = False
    """Begins at the latents before a denoising step of each sample, not at its final ones; for kind gradient."""
    keeps_old_policy: bool = False
    """Compares with an old policy, which follows the trained one by `algorithm.old_policy`."""
    old_policy_samples: bool = True
    """The old policy samples, where there is one; if not, the trained policy does."""

    @property
    def model(self) -> type[LossSettings]:
        """The table `[algorithm]` of a job with this loss."""
        return self.settings or _composed(self.name)

    @property
    def elsewhere(self) -> dict[str, Any]:
        """`defaults` of other parts of the job, and of tables inside `[algorithm]`."""
        return {name: value for name, value in self.defaults.items() if "." in name}

    @property
    def traits(self) -> Kind:
        """Properties that it shares with the others of its kind."""
        return KINDS[self.kind]

    def load(self) -> Callable[..., Any]:
        """Imports the function; needs torch."""
        return imported(self.function)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named combination."""

    name: str
    title: str
    """Name that its authors use."""
    paper: str
    """URL."""
    summary: str
    """A sentence."""
    loss: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Dotted settings of a job to the values that this algorithm gives them where the job does not."""
    data: Literal["prompts", "preferences"] = "prompts"
    """Content of `data.train`: prompts to sample, or pairs of finished media that are only encoded."""


STEPS: dict[str, Step] = {}
LOSSES: dict[str, Loss] = {}
ALGORITHMS: dict[str, Algorithm] = {}


def register_step(step: Step) -> None:
    """Raises ValueError for a name that is taken."""
    add(step, STEPS, "a step")


def register_loss(loss: Loss) -> None:
    """Raises ValueError for a name that is taken, or a kind that is not there."""
    if loss.kind not in KINDS:
        raise ValueError(f"loss {loss.name} is of kind {loss.kind}, which is none of {', '.join(KINDS)}")
    add(loss, LOSSES, "a loss")


def register_algorithm(algorithm: Algorithm) -> None:
    """Raises ValueError for a name that is taken, or a loss that is not there."""
    if algorithm.loss not in LOSSES:
        raise ValueError(f"algorithm {algorithm.name} names the loss {algorithm.loss}: register that first")
    add(algorithm, ALGORITHMS, "an algorithm")


class _Known(
    settings.NatsSettings,
    settings.TrustRegionSettings,
    settings.LikelihoodSettings,
    settings.NoiseLevelSettings,
    settings.OldPolicySettings,
    settings.PairSettings,
    settings.TeacherSettings,
    settings.LengthSettings,
):
    beta: settings.Beta = 0.1


@cache
def _composed(name: str) -> type[LossSettings]:
    """The model of a loss that names Flowfleet's own settings."""
    loss = LOSSES[name]
    base = settings.PairwiseSettings if loss.needs_pairs else loss.traits.settings
    given = {key: value for key, value in loss.defaults.items() if "." not in key}
    fields = {key: _field(key, base, given, loss.at_most) for key in dict.fromkeys((*loss.reads, *given))}
    model: type[LossSettings] = create_model(f"{name.title()}Settings", __base__=base, **fields)
    return model


def _field(name: str, base: type[LossSettings], given: Mapping[str, Any], at_most: Mapping[str, float]) -> Any:
    """A setting as another loss has it, with this loss's default and bound."""
    models: list[type[BaseModel]] = [base, _Known, *(loss.settings for loss in LOSSES.values() if loss.settings)]
    found = next((model.model_fields[name] for model in models if name in model.model_fields), None)
    if found is None:
        raise ValueError(f"algorithm.{name} is a setting of no loss: declare it in a model and give that as `settings`")
    info = copy(found)
    info.default = given.get(name, found.default)
    kind: Any = found.annotation
    return (Annotated[kind, Field(le=at_most[name])] if name in at_most else kind, info)
