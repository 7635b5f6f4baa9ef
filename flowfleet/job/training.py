"""How the trainer updates weights: `[trainer]` and its tables."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flowfleet.job.part import NAMES, Part
from flowfleet.part import rule


class LoraPart(Part):
    rank: int = Field(default=64, ge=1, le=4096)
    """Rank of the adapter's matrices."""
    alpha: float = Field(default=128.0, gt=0.0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """Names of modules that are adapted; unset: those that suit the model's family."""


class OptimizerPart(Part):
    """AdamW."""

    lr: float = Field(default=3e-4, gt=0.0, lt=1.0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=1e-4, ge=0.0)
    """Decoupled weight decay, multiplied by `lr`."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Norm that gradients are scaled down to."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How `lr` falls to 0 between the warm-up and the job's last update: not at all, linearly, or by half a cosine."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates in which `lr` rises linearly from 0."""
    state: Literal["device", "host", "8bit"] = "device"
    """Where the two moments are: fp32 next to the weights, fp32 in host memory, or 8 bits next to the weights."""


class EmaPart(Part):
    """An average of the trained weights, which is validated and exported in their place; nothing samples with it. After
    update n it keeps the share min(decay, (1 + n) / (10 + n)) of itself and takes the rest from the trained weights."""

    decay: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Greatest share; null: no average. 0 is the trained weights themselves, where an old policy samples."""
    every: int = Field(default=1, ge=1)
    """Updates from one step of the average to the next: it follows those n of which n + 1 is a multiple of this."""


_NAME = rule(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", NAMES.format(63))
_LABEL = rule(
    r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
    "give the name of a label of nodes, as in topology.kubernetes.io/rack",
)


class KubernetesPart(Part):
    """Place of the trainer's pods on a cluster. Fleets of one machine do not read it."""

    priority_class: str | None = Field(default=None, pattern=_NAME)
    """PriorityClass, among those that the operator allows jobs; unset: the chart's."""
    queue: str | None = Field(default=None, pattern=_NAME)
    """LocalQueue of Kueue that admits the trainer, among those that the operator allows jobs; unset: the chart's."""
    required_topology: str | None = Field(default=None, pattern=_LABEL)
    """Label of nodes, known to Kueue's topology, of which all pods must have the same value."""
    preferred_topology: str | None = Field(default=None, pattern=_LABEL)
    """The same as a wish, which Kueue drops where it cannot be had."""

    @model_validator(mode="after")
    def _one_topology(self) -> Self:
        if self.required_topology and self.preferred_topology:
            raise ValueError("required_topology and preferred_topology exclude each other: leave one of them out")
        return self


class MeshPart(Part):
    """How the trainer's ranks are arranged: `world_size` = replicate × shard × sequence. Consecutive ranks share a
    sample, then consecutive ones the weights, so that both stay on a host."""

    replicate: int | None = Field(default=None, ge=1, le=4096)
    """Copies of sharded weights (HSDP); only gradients travel between them, once an update. Unset: one a host where its
    devices have room."""
    sequence: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    """Ranks that share each sample's tokens (Ulysses). auto: as few of a host's as are predicted to fit."""

    @property
    def degree(self) -> int:
        """Ranks a sample; 1 while that is open."""
        return 1 if self.sequence == "auto" else self.sequence


class TrainerPart(Part):
    backend: Literal["fsdp", "veomni"] = "fsdp"
    """Training engine: ours on PyTorch's FSDP2, or VeOmni's models, for text."""
    mode: Literal["lora", "full"] = "lora"
    """lora: train an adapter on frozen weights. full: train all weights of the transformer."""
    lora: LoraPart = LoraPart()
    optimizer: OptimizerPart = OptimizerPart()
    ema: EmaPart = EmaPart()
    kubernetes: KubernetesPart = KubernetesPart()
    resume: str | None = Field(default=None, min_length=1)
    """Checkpoint that the job starts from, with all moments, averages and the old policy: `job:ID@STEP`, or its folder,
    readable by controller and trainer. Model, adapter and losses must keep the same tensors. The job's own steps and
    learning rate start from 0."""
    world_size: int = Field(default=1, ge=1, le=4096)
    """Ranks of torchrun, one an accelerator."""
    launcher: Literal["controller", "attach"] = "controller"
    """attach: somebody else starts the ranks, by the command that `flowfleet attach` prints."""
    sharding: Literal["auto", "replicate", "fsdp"] = "auto"
    """replicate: each rank holds the model, and only an adapter's gradients travel (LoRA). fsdp: they share it and
    gather a block at a time. auto: replicate for LoRA where the base takes at most half a device, else fsdp."""
    mesh: MeshPart = MeshPart()
    updates_per_step: int = Field(default=1, ge=1, le=64)
    """Optimizer updates a step, which split its samples. Unset: the loss's, 2 where it limits the ratio to the old
    policy, which is 1 in a step's only update."""
    passes: int = Field(default=1, ge=1, le=64)
    """Number of passes through a step's samples, each of `updates_per_step` updates. The old policy is the one before
    the first."""
    micro_batch_size: int = Field(default=16, ge=1, le=4096)
    """Rows of one forward and backward on one rank. Of sequences: `micro_batch_tokens` counts in its place."""
    micro_batch_tokens: int = Field(default=8192, ge=1, le=16_777_216)
    """Tokens of one forward and backward on one rank, prompts counted, that sequences are packed into without padding.
    A longer sequence is alone."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward: none, all but the costly ones (matrix products and
    attention), or all inside a block."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: large linears of the transformer's blocks compute in float8 (e4m3, a scale a row), in the forward and for
    the gradients of their inputs. Weights, their gradients and the optimizer stay as they are, and experts of a mixture
    compute in `model.dtype`. `mode = "full"` only."""
    compile: bool = False
    """Compile the transformer's blocks; the first update of a shape waits for it."""
    deterministic: bool = False
    """Keep the rollout's batches and their order, so that log-probs are recomputed bit for bit."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads a rank; unset: all cores shared by the ranks."""
    offload: Literal["none", "optimizer", "activations", "auto"] = "none"
    """LoRA's state in pinned host memory. optimizer: fp32 weights and moments. activations: also the inputs of
    blocks, which full checkpointing keeps. auto: the first that is predicted to fit the device."""
    samples: Literal["no", "idle", "only"] = "no"
    """Sampling by the trainer's ranks, as replicas of their own job. idle: in addition to rollouts, between updates.
    only: no rollouts at all, strictly on-policy."""

    def offloads(self, what: Literal["optimizer", "activations"]) -> bool:
        """Returns True if that is in host memory; `auto` counts as none."""
        return self.offload == "activations" or self.offload == what
