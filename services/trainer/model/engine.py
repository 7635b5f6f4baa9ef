"""Model on its ranks: transformers and adapter, sharded by FSDP2 or whole on each rank, with AdamW on the trained part.

Only the transformers are loaded: one, or the two experts of some families. They are made without weights and sharded;
then each rank fills its own part (loading.py). The trained weights, adapters or everything, have fp32 masters, which
are cast to `model.dtype` for the forward; their gradients are reduced in fp32. With LoRA the base stays in
`model.dtype`, frozen. Where every rank has room for all of it (`trainer.sharding`), replicated.py holds the adapters.
Else each transformer is an FSDP root, and its blocks are FSDP units.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowfleet import hub
from flowfleet.hardware import devices
from flowfleet.hardware.graphs import Graphs
from flowfleet.hardware.offloading import Offload
from flowfleet.job.spec import JobSpec
from flowfleet.local.devices import DEVICES_FILE, Devices
from flowfleet.models import level_tables, sequence_parallel
from flowfleet.models.base import Schedule
from flowfleet.models.empty import cast_persistent_buffers
from flowfleet.models.level_tables import LevelLayers
from flowfleet.models.registry import family_of
from flowfleet.models.trainable import blocks_of, require_trainable
from flowfleet.planning.automatic import settled
from flowfleet.planning.replicas import replicates
from flowfleet.process.service import STATE_DIR, THREADS, usable_cpus
from flowfleet.proto.rollout_pb2 import Bucket, LoraSpec, ModelSpec
from flowfleet.quantization import adapted, layers
from flowfleet.seeds import derive_seed
from flowfleet.weights import lora, weights
from services.trainer.model.backends import backend_of
from services.trainer.model.gather import Gather
from services.trainer.model.kinds import ModelKind, model_kind
from services.trainer.model.loading import DummySource, Source, fill, fill_by_blocks, fill_parameter
from services.trainer.model.policies import Policies, Policy
from services.trainer.model.sizes import Sizes
from services.trainer.model.warm_start import WarmStart, open_adapter
from services.trainer.optim.adamw import ShardedAdamW
from services.trainer.optim.loss_scale import LossScale
from services.trainer.parallel.blocks import checkpoint_blocks, compile_blocks
from services.trainer.parallel.mesh import Mesh, arrange, degrees
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.replicated import ReplicatedAdapter
from services.trainer.parallel.sharding import allocate, local, reshard

log = logging.getLogger(__name__)


class Engine:
    """The trainable model of a job. Methods marked collective must be called by all ranks alike."""

    folder: Path
    """The checkpoint's, on this machine."""
    adapter: Any
    """`ModelAdapter`, or `SequenceAdapter` of a model that writes text."""
    kind: ModelKind
    experts: dict[str, Any]
    """`adapter.experts`, transformers by component name: sharded, or whole."""
    trained: dict[str, Any]
    """Parameters that are trained, by published name: DTensors, fp32."""
    optimizer: ShardedAdamW
    loss_scale: LossScale
    policies: Policies
    """Policies that are kept besides the trained weights."""
    decoder: Any
    """An adapter with the VAE, of jobs that train on gradients of rewards; else None."""
    mesh: Mesh
    replicates: bool
    """True if every rank holds the whole model and trains an adapter of it; False if the ranks share the weights."""

    def __init__(self, spec: JobSpec, ranks: Ranks, *, resumes: bool = False) -> None:
        """Loads the model; `shard` comes next. `resumes`: a checkpoint is loaded after that, so `model.adapter` is not
        read; teachers always are. Raises ValueError for a model, size, target or adapter that is not there, an adapter
        that does not fit, limits that limit nothing at this size, or noise that a step is too coarse for."""
        self.spec, self.ranks = spec, ranks
        self.dtype = weights.dtype_of(spec.model.dtype)
        _set_threads(spec, ranks)
        if self.is_quantized:
            layers.require_fp8(ranks.device, self.dtype, "model.base = 'fp8'", emulated=True)
        if spec.trainer.quantization == "fp8":
            layers.require_fp8(ranks.device, self.dtype, "trainer.quantization = 'fp8'", emulated=True)
        load_dtype = self.dtype if self.is_lora else torch.float32
        self.folder = hub.pipeline(spec.model.path, ranks.beats.beat)
        self.backend = backend_of(spec)
        self.adapter = self.backend.load(_family(spec, self.folder), self.folder, load_dtype, ranks)
        spec = self.spec = settled(spec, devices.memory_bytes(ranks.device), [*self._degrees(spec)])
        self.kind = model_kind(spec, self.adapter)
        self.mesh = self._arranged()
        self.loss_scale = LossScale(self.kind.check(spec, self.adapter), is_on=self.dtype == torch.float16)
        self.sizes = Sizes(self.adapter, spec)
        self.experts = dict(self.adapter.experts)
        library = self.adapter.pipeline_class if self.kind.layout.library == "diffusers" else None
        require_trainable(self.experts, library, lora=self.is_lora)
        self._sources = {component: self.source(component) for component in self.experts}
        for component, expert in self.experts.items():
            self._sources[component].check(expert)
            expert.requires_grad_(not self.is_lora)
            cast_persistent_buffers(expert, self.dtype)
        if self.is_lora:
            lora.inject_lora(self.experts, lora_spec(spec), dtype=torch.float32)
        if self.is_quantized:
            self._put_tables()
        self._start: WarmStart | None = None
        if spec.model.adapter is not None and not resumes:
            self._start = open_adapter(Path(spec.model.adapter), list(self.experts))
            self._start.check(lora.named_adapter_parameters(self.experts), lora_spec(spec))
        self._teachers = {name: self._open_teacher(name) for name in spec.teachers}
        for expert in self.experts.values():
            if spec.trainer.quantization == "fp8":
                layers.train_in_fp8(blocks_of(expert))
            if spec.trainer.gradient_checkpointing != "none":
                checkpoint_blocks(expert, spec.trainer.gradient_checkpointing, is_compiled=spec.trainer.compile)
            if spec.trainer.compile:
                adapted.put(adapted.SharingLinear, expert.modules())
                compile_blocks(expert)
        if spec.trainer.compile:
            ranks.beats.watch_compilations()

    def shard(self) -> None:
        """Collective. Spreads the model over the ranks' devices, reads or draws this rank's shards, makes the optimizer
        and keeps the policies that the job needs besides the trained one."""
        self.replicates = self._all_fit()
        self._replicated: dict[str, ReplicatedAdapter] = {}
        for component, expert in self.experts.items():
            blocks = blocks_of(expert)  # FSDP renames their classes
            if not self.replicates:
                self.backend.shard(expert, self.ranks, self.dtype, self.mesh)
            source = self._sources.pop(component)
            if self.is_quantized:
                fill_by_blocks(expert, blocks, source, self.ranks, lambda block: layers.replace_weights([block]))
            else:
                allocate(expert, self.ranks.device)
                fill(expert, source, self.ranks)
        self.adapter.device, self.adapter.dtype = self.ranks.device, self.dtype
        self.adapter.skips_branches = self.replicates or self.ranks.world_size == 1
        self.adapter.joins_branches = self.replicates and not self.spec.trainer.deterministic
        if self.mesh.sequence > 1:
            sharing = sequence_parallel.mesh_of(self.ranks.device.type, self.mesh.world_size, self.mesh.sequence)
            sequence_parallel.split(self.adapter, sharing, self.ranks.device)
        named = lora.named_adapter_parameters if self.is_lora else weights.full_parameters
        self.trained = dict(named(self.experts))
        if self.replicates:
            masters_on = torch.device("cpu") if self.spec.trainer.offloads("optimizer") else None
            for component, expert in self.experts.items():
                own = {name: part for name, part in self.trained.items() if name.startswith(f"{component}.")}
                self._replicated[component] = ReplicatedAdapter(expert, own, self.ranks, self.dtype, masters_on)
            self.trained = {name: m for whole in self._replicated.values() for name, m in whole.masters.items()}
        teachers = {}
        for name, start in self._teachers.items():  # through the trained parameters, whose own values come after this
            start.fill(self.trained, self.ranks)
            teachers[name] = {key: local(parameter).clone() for key, parameter in self.trained.items()}
        if self.is_lora:
            self._start_adapter()
        if not self.spec.writes_tokens and self.spec.records_steps:
            self.adapter.expect_levels(self.schedule.timesteps)
        self._offloads = {}
        if self.spec.trainer.offloads("activations") and devices.is_accelerator(self.ranks.device):
            self._offloads = {name: Offload(expert, self.ranks.device) for name, expert in self.experts.items()}
        self._graphs = self._captured() if self._captures else []
        self.decoder = self._decoder() if self.spec.trains_on_gradients else None
        self.optimizer = ShardedAdamW(self.trained, self.spec.trainer.optimizer, self.ranks)
        self.policies = Policies(self.spec, self.experts, self.trained, self.dtype, teachers)

    @property
    def schedule(self) -> Schedule:
        """Returns the schedule that rollouts sample the job's size with."""
        return self.sizes.of(self.spec.rollout.size).schedule

    @property
    def is_lora(self) -> bool:
        return self.spec.trainer.mode == "lora"

    @property
    def is_quantized(self) -> bool:
        """True if the frozen base is held in float8."""
        return self.spec.model.base == "fp8"

    def component(self, timestep: Tensor) -> str:
        """Name of the expert for noise levels (0-d or (B,), 1000 sigma) that are all of one expert."""
        expert = self.adapter.expert(timestep)
        return next(name for name, module in self.experts.items() if module is expert)

    @property
    def _captures(self) -> bool:
        """True if small micro-batches replay CUDA graphs."""
        part = self.spec.trainer
        has_flow = not self.spec.writes_tokens and self.replicates and self.mesh.sequence == 1
        return has_flow and part.compile and not part.deterministic and devices.has_graphs(self.ranks.device)

    def _captured(self) -> list[Graphs]:
        # Without full checkpointing a graph would keep all activations.
        trains, found = self.spec.trainer.gradient_checkpointing == "full", list[Graphs]()
        for component, expert in self.experts.items():
            offload = self._offloads.get(component)
            may = (lambda offload=offload: offload.is_empty) if offload else (lambda: True)
            found.append(Graphs(expert, state=partial(lora.adapter_is_on, expert), trains=trains, may_replay=may))
            if offload:
                offload.is_replaying = found[-1].is_in_flight
        return found

    def make_room(self) -> bool:
        """Frees memory that updates hold between them: graphs, and sums of gradients. Returns True if there was any."""
        held = [graphs for graphs in self._graphs if graphs.holds]
        for graphs in held:
            graphs.release()
        freed = [whole.free() for whole in self._replicated.values()]
        return bool(held) or any(freed)

    @contextmanager
    def policy(self, policy: Policy) -> Iterator[None]:
        """Inside, forwards (without gradient) are those of another policy; see `Policies.active`."""
        with self.policies.active(policy):
            yield
        for whole in self._replicated.values():
            whole.refresh()

    @contextmanager
    def backward(self, component: str, *, is_last: bool) -> Iterator[None]:
        """Surrounds each forward and backward of an update, for the expert that it goes through. Collective at the
        last.

        An adapter's gradients are reduced once, at the expert's last; full ones each time, because no rank can keep
        them unsharded, but between copies of the weights once too.
        """
        if self.is_lora and not self.replicates:
            self.experts[component].set_requires_gradient_sync(is_last)
        elif self.mesh.replicate > 1 and not self.replicates:
            self.experts[component].set_requires_all_reduce(is_last)
        yield
        if self.replicates:
            self._replicated[component].collect(is_last=is_last)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that `gather` fills, without its memory."""
        return weights.make_buckets(weights.specs_of(self.trained, self.dtype))

    def gather(self, *, evaluated: bool = False) -> Gather:
        """Prepares the weights that are published: those that sample, or those that are evaluated; see
        `Policies.weights`. They come in `model.dtype` and are gathered bucket by bucket."""
        self.reshard()
        tensors = self.policies.weights(evaluated=evaluated)
        return Gather(tensors, self.dtype, self.ranks.device, on_bucket=self.ranks.beats.beat)

    def full_tensors(self, *, evaluated: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Collective, a bucket at a time. Yields the published weights as whole tensors, by published name."""
        return self.gather(evaluated=evaluated).tensors()

    def reshard(self) -> None:
        """Frees gathered parameters, which a forward without backward leaves, so that the model holds its shards."""
        reshard(self.experts)

    def _decoder(self) -> Any:
        """Decodes as eager rollouts do, and with gradients, whose activations are computed again in the backward."""
        loaded = _family(self.spec, self.folder).load(
            self.folder,
            dtype=self.dtype,
            device=self.ranks.device,
            components=("vae",),
            load_format=self.spec.model.load_format,
        )
        loaded.checkpoint_decoding()
        return loaded

    def _arranged(self) -> Mesh:
        """Raises ValueError for a model or a size that ranks cannot share as `trainer.mesh` says."""
        num_elements = sum(p.numel() for expert in self.adapter.experts.values() for p in expert.parameters())
        mesh = arrange(self.spec, self.ranks.world_size, num_elements, devices.memory_bytes(self.ranks.device))
        self._require_shared(self.spec, mesh.sequence)
        return mesh

    def _degrees(self, spec: JobSpec) -> Iterator[int]:
        """Numbers of ranks that can share a sample."""
        for degree in degrees(spec, self.ranks.world_size):
            with suppress(ValueError):
                self._require_shared(spec, degree)
                yield degree

    def _require_shared(self, spec: JobSpec, degree: int) -> None:
        """Raises ValueError for a model or a size that `degree` ranks cannot share."""
        if degree > 1:
            setting = "trainer.mesh.sequence"
            sequence_parallel.require_model(family_of(self.folder), self.folder, degree, setting)
            sequence_parallel.require_tokens(self.adapter, spec.rollout.size, degree, setting)

    def _all_fit(self) -> bool:
        """Collective. Whether the base is to be whole on every rank, and every rank's device has room for it."""
        base = sum(tensor.nbytes for expert in self.experts.values() for tensor in expert.parameters())
        fits = replicates(self.spec, base, devices.memory_bytes(self.ranks.device))
        return not self.ranks.max(torch.tensor(float(not fits)))

    def source(self, component: str) -> Source:
        """Weights of a transformer before training, from disk or drawn again."""
        model = self.spec.model
        if model.load_format == "dummy":
            return DummySource(component, self.ranks.device)
        return self.kind.source(self.folder, component)

    def _open_teacher(self, name: str) -> WarmStart:
        teacher = self.spec.teachers[name]
        opened = open_adapter(Path(teacher.adapter), list(self.experts), f"algorithm.teachers.{name}.adapter")
        opened.check(lora.named_adapter_parameters(self.experts), lora_spec(self.spec))
        return opened

    def _put_tables(self) -> None:
        """Has tables take the place of layers that read the noise level alone, unless the adapter trains one."""
        found: LevelLayers | None = getattr(self.adapter, "level_layers", None)
        for component, expert in self.experts.items():
            if found is not None and found.fit(expert, lora_spec(self.spec).target_modules):
                whole = partial(_whole_parameter, self._sources[component])
                level_tables.install(expert, found, whole, self.ranks.beats.beat)

    def _start_adapter(self) -> None:
        """Fills the adapter from `model.adapter`, if named. Else each rank draws all of it and keeps its own shards."""
        if self._start is not None:
            self._start.fill(self.trained, self.ranks)
            self._start = None
            log.info("starting from the adapter %s", self.spec.model.adapter)
            return
        seed = derive_seed(self.spec.seed, "lora")
        for name, start in lora.initial_values(self.trained, lora_spec(self.spec), seed):
            fill_parameter(self.trained[name], start.__getitem__)


def _whole_parameter(source: Source, name: str, shape: Sequence[int]) -> Tensor:
    return source.rows(name, shape, slice(None))


def _family(spec: JobSpec, path: str | Path) -> Any:
    """The adapter class for the kind of policy that the job trains."""
    return family_of(path).load(writes_tokens=spec.writes_tokens)


def model_spec(spec: JobSpec, fingerprint: str = "", threads: int = 0) -> ModelSpec:
    """Returns the model that replicas load; its folder had this fingerprint. `threads`: `shared_threads`. Settings at
    their default are left out, so that a replica that loaded the same folder at its start needs no second load."""
    model, rollout = spec.model, spec.rollout
    is_usual = model.max_sequence_length == _family(spec, model.path).max_sequence_length
    return ModelSpec(
        path=model.path,
        dtype=model.dtype,
        load_format="dummy" if model.load_format == "dummy" else "",
        compile=rollout.compile,
        quantization="fp8_base" if model.base == "fp8" else "fp8" if rollout.has_fp8_copies else "",
        max_sequence_length=0 if is_usual else model.max_sequence_length or 0,
        fingerprint=fingerprint,
        threads=threads,
    )


def lora_spec(spec: JobSpec) -> LoraSpec:
    """LoRA settings, with the family's target modules if the job names none."""
    part, merged = spec.trainer.lora, spec.rollout.adapter == "merged"
    targets = part.target_modules or _family(spec, spec.model.path).lora_targets
    return LoraSpec(rank=part.rank, alpha=part.alpha, target_modules=targets, merged=merged)


def num_threads(spec: JobSpec, ranks: Ranks) -> int:
    """CPU threads of a thread that computes: as the job says, else the share of whoever started the trainer. On one
    machine ranks share out the CPUs among those that run now, unless the job is deterministic."""
    share = int(os.environ.get(THREADS) or max(1, usable_cpus() // ranks.world_size))
    if spec.trainer.threads or spec.trainer.deterministic or STATE_DIR not in os.environ:
        return spec.trainer.threads or share
    running = Devices(Path(os.environ[STATE_DIR]) / DEVICES_FILE).num_taken
    return max(1, usable_cpus() // max(running, ranks.world_size)) if running else share


def shared_threads(spec: JobSpec, ranks: Ranks) -> int:
    """CPU threads that replicas must compute with as well, so that both round alike; 0: any number."""
    return num_threads(spec, ranks) if spec.trainer.deterministic and not devices.is_accelerator(ranks.device) else 0


def _set_threads(spec: JobSpec, ranks: Ranks) -> None:
    """Sets the threads of the calling thread, which must be the one that computes."""
    torch.set_num_threads(num_threads(spec, ranks))
    if spec.trainer.deterministic and devices.is_accelerator(ranks.device):
        torch.use_deterministic_algorithms(True, warn_only=True)
