"""A plan as people read it, on one screen."""

from __future__ import annotations

from collections.abc import Mapping

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowfleet.job.spec import JobSpec
from flowfleet.planning.memory import GIB, RESERVE
from flowfleet.planning.plan import Plan


def show_plan(spec: JobSpec, plan: Plan, console: Console) -> None:
    """The job, memory of a rank and of a replica, what a step is, and whether it fits."""
    part, rollout = spec.trainer, spec.rollout
    adapter = f"LoRA rank {part.lora.rank}" if part.mode == "lora" else "full fine-tuning"
    console.print(
        f"{spec.name}: {_count(plan.params)} parameters, {_count(plan.trained)} trained ({adapter}), "
        f"{rollout.height}×{rollout.width}, {spec.samples_per_step} samples a step\n",
        highlight=False,
    )
    ranks = f"A trainer rank of {part.world_size}" if part.world_size > 1 else "The trainer"
    how = f"micro-batch {part.micro_batch_size}, checkpointing {part.gradient_checkpointing}"
    trainer = _memory(f"{ranks}, GiB", plan.trainer.parts, how)
    trainer.add_section()
    trainer.add_row("peak in the update", _gib(plan.trainer.update_peak))
    trainer.add_row("peak in the optimizer's step", _gib(plan.trainer.optimizer_peak))
    if part.samples != "no":
        trainer.add_row(f"peak while it samples (batch {rollout.batch_size})", _gib(plan.trainer.sampling_peak))
    if plan.trainer.gradient_peak:
        trainer.add_row("peak while a picture is decoded with gradient", _gib(plan.trainer.gradient_peak))
    trainer.add_row("host memory", _gib(plan.trainer.host))
    replica = _memory("A rollout replica, GiB", plan.rollout.parts, f"batch {rollout.batch_size}")
    replica.add_section()
    replica.add_row("peak", _gib(plan.rollout.peak))
    replicas = [replica] if plan.rollout.parts else []
    console.print(Columns([trainer, *replicas, _step(plan), _storage(plan)], padding=(0, 4)))
    _verdict(plan, console)
    if plan.images_per_s is not None:
        rate = f"{plan.images_per_s:.2g} samples/s by a device that samples and trains for itself"
        console.print(f"Predicted: {rate}, compiled, without waiting for rewards.", highlight=False)


def _memory(title: str, parts: Mapping[str, float], how: str) -> Table:
    made = _table(title)
    for name, size in parts.items():
        made.add_row(f"{name} ({how})" if name == "activations" else name, _gib(size))
    return made


def _step(plan: Plan) -> Table:
    work = plan.work
    made = _table("A step")
    made.add_row("rollout, FLOPs a sample", _flops(work.rollout_flops_per_sample))
    made.add_row("training, FLOPs a sample", _flops(work.train_flops_per_sample))
    made.add_row("FLOPs in all", _flops(work.flops))
    made.add_row("published", _bytes(work.published_bytes))
    made.add_row("trajectories and prompts", _bytes(work.trajectory_bytes))
    made.add_row("media, at most", _bytes(work.media_bytes))
    made.add_row("a checkpoint", _bytes(work.checkpoint_bytes))
    if work.gradient_bytes:
        made.add_row("kept gradients, at most", _bytes(work.gradient_bytes))
    return made


def _storage(plan: Plan) -> Table:
    stored = plan.storage
    made = _table("Blobs at once (in Redis by default)")
    made.add_row(f"trajectories of {plan.held_steps} steps", _bytes(stored.trajectories))
    made.add_row("prompts of these steps", _bytes(stored.prompts))
    made.add_row("pictures of samples", _bytes(stored.pictures))
    made.add_row("pictures of a day's validations", _bytes(stored.validations))
    made.add_row("adapters", _bytes(stored.adapters))
    made.add_row("records (always in Redis)", _bytes(stored.records))
    made.add_section()
    made.add_row("in all, at most", _bytes(stored.total))
    return made


def _verdict(plan: Plan, console: Console) -> None:
    if plan.device_bytes is None:
        console.print("\nGive --device-memory GIB to see whether it fits.", highlight=False)
        return
    limit = f"devices of {_gib(plan.device_bytes)} GiB, {RESERVE // GIB} GiB of which are not for tensors"
    if plan.fits:
        console.print(Text(f"\nFits {limit}.", style="green"))
        return
    console.print(Text(f"\nDoes not fit {limit}. Any of these is enough:", style="red"))
    for line in plan.advice:
        console.print(f"  {line}", highlight=False)


def _table(title: str) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column(title)
    made.add_column("", justify="right")
    return made


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.1f}" if gib >= 0.1 else f"{gib:.2g}"


def _count(number: float) -> str:
    return _scaled(number, (1e9, " B"), (1e6, " M"), (1e3, " K"))


def _flops(number: float) -> str:
    return _scaled(number, (1e15, " P"), (1e12, " T"), (1e9, " G"))


def _bytes(number: float) -> str:
    return _scaled(number, (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"))


def _scaled(number: float, *units: tuple[float, str]) -> str:
    """Scales a number to the first unit that is not larger than it, else to the last one."""
    size, name = next((unit for unit in units if number >= unit[0]), units[-1])
    return f"{number / size:.1f}{name}"
