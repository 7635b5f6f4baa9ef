"""The tables of docs/results.md. Pure: rows of bench/results in, Markdown out. A row that is not there is left out
of its table, and "not measured" in the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.performance_goals import NONE, PER_GPU, Rows, summary
from docs.generate.markdown import table

PHASES = ("gen", "reward", "load_samples", "old_log_prob", "update_actor", "update_weights")


def parts(rows: Rows) -> dict[str, str]:
    """The generated parts of the page by name."""
    return {
        "performance-machine": machine(rows),
        "performance-summary": summary(rows),
        "performance-rollout": rollouts(rows),
        "performance-train": trainers(rows),
        "performance-scaling": scaling(rows),
        "performance-publish": published(rows),
        "performance-parallel": parallel(rows),
        "performance-loop": loops(rows),
        "performance-compare": compared(rows),
        "performance-kill": killed(rows),
        "performance-proof": proofs(rows),
        "performance-gap": gaps(rows),
        "performance-memory": memory(rows),
        "performance-layers": layers(rows),
        "performance-sequences": sequence_tables(rows),
    }


Measured = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
"""A machine, and the figures measured on it."""


def sequence_tables(rows: Rows) -> str:
    """Models that write text: rollout and update, gap of log-probs, weight update."""
    named = [row for name, row in rows.items() if name.startswith("sequences")]
    found = [(row["machine"], it) for row in named for it in row["figures"]]
    return "\n\n".join([_speeds(found), _token_gaps(found), _updates(found)]) if found else "Not measured yet."


def _speeds(found: Measured) -> str:
    lines = []
    for machine_, it in found:
        settings, rollout, train = it["settings"], it["rollout"], it["train"]
        written = rollout.get("tokens_of_sequence", settings["tokens"])
        lines.append(
            [
                machine_.get("devices", NONE),
                settings["engine"],
                f"{settings['layers']}, {settings['dtype']}",
                f"{settings['rows']} × ({settings['prompt']} + {written})",
                _number(rollout.get("tokens_per_s"), ",.0f"),
                _number(rollout.get("decode_tokens_per_s"), ",.0f"),
                _number(train.get("tokens_per_s"), ",.0f"),
                _percent(train.get("mfu")),
                _number(train.get("update_s"), ".2f"),
                _number(train.get("old_log_prob_s"), ".2f"),
                f"{_number(rollout.get('peak_gib'), '.0f')}, {_number(train.get('peak_gib'), '.0f')}",
            ]
        )
    header = [
        "on",
        "engine",
        "layers",
        "sequences × tokens",
        "rollout: tokens/s",
        "decoding alone",
        "update: tokens/s",
        "MFU",
    ]
    return table([*header, "update s", "old log-probs s", "GiB"], lines)


def _token_gaps(found: Measured) -> str:
    said = {
        "replayed": "packed, the rollout's experts",
        "recomputed": "packed, the model's own experts",
        "alone": "one sequence a forward",
    }
    lines = [
        [
            machine_.get("devices", NONE),
            it["settings"]["engine"],
            said[name],
            *(_number(gap[key], ".2e") for key in ("mean", "p99", "max", "token_mean")),
            _percent(gap["beyond_clip"]),
            _percent(gap.get("rerouted")),
            _percent(gap["exact"]),
        ]
        for machine_, it in found
        for name, gap in it["train"].get("gap", {}).items()
    ]
    header = ["on", "engine", "trainer", "mean", "p99", "max", "mean of tokens", "beyond clip", "rerouted", "exact"]
    return table(header, lines)


def _updates(found: Measured) -> str:
    lines = []
    for machine_, it in found:
        sent = it["publish"]
        if "failed" in sent:
            continue
        lines.append(
            [
                machine_.get("devices", NONE),
                it["settings"]["engine"],
                f"{sent['parameters'] / 1e9:.2f} B, {it['settings']['full_layers']} layers",
                f"{sent['bytes'] / 1e9:.2f} GB, {sent['expert_bytes'] / 1e9:.2f} GB experts",
                f"{sent['transfer_s']:.1f} s",
                f"{sent['verify_s'] * 1e3:.0f} ms",
                "yes" if sent["is_verified"] and sent["is_new"] else "no",
                "yes" if sent["flipped_element_found"] else "no",
                _percent(sent["exact_after"]),
            ]
        )
    header = [
        "on",
        "engine",
        "weights",
        "sent over Gloo",
        "transfer",
        "hashing",
        "hashes equal",
        "a flipped element is found",
    ]
    return table([*header, "then exact"], lines)


def layers(rows: Rows) -> str:
    """Milliseconds of one layer, and seconds of a whole forward and of forward and backward, extrapolated from it."""
    lines = [
        [
            f"{it['model']}, {'compiled' if it['compile'] else 'eager'}",
            f"{figure['size']}² × {figure['batch']}",
            f"{figure['forward_ms']:.1f}",
            _percent(figure["mfu"]),
            f"{figure['trained_ms']:.1f}",
            f"{figure['trained_checkpointed_ms']:.1f}",
            f"{figure['outside_ms']:.1f}",
            f"{figure['forward_depth_ms'] / 1e3:.2f}",
            f"{figure['trained_checkpointed_depth_ms'] / 1e3:.2f}",
        ]
        for name, row in rows.items()
        for it in (row["figures"] if name.startswith("layer-") else ())
        for figure in it["figures"]
    ]
    if not lines:
        return "Not measured."
    header = ["model", "pictures", "forward ms", "MFU", "LoRA forward + backward ms", "the same, checkpointed"]
    return table([*header, "outside ms", "forward of 32 layers, s", "LoRA step of 32 layers, s"], lines)


def machine(rows: Rows) -> str:
    """Each machine once; where a commit is known, once for each, with the rows that are measured at it."""
    found: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "machine" in row:
            found.setdefault(_machine(row["machine"]), []).append(name)
    lines = [f"- {it}: {', '.join(names)}" if ", commit " in it else f"- {it}" for it, names in found.items()]
    return "\n".join(lines) or "Nothing is measured yet."


def _machine(it: Mapping[str, Any]) -> str:
    said = [value if name == "devices" else f"{name} {value}" for name, value in it.items() if name != "dirty"]
    return ", ".join(said) + (" with uncommitted changes" if it.get("dirty") else "")


def rollouts(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        for it in row["figures"] if name.startswith("rollout") else ():
            share = it.get("share") or {}
            kind = (
                f"{it['engine']}, {'compiled' if it['compile'] else 'eager'}, {it['quantization']}"
                if share
                else "eager"
            )
            lines.append(
                [
                    f"{it['row']} ({kind})",
                    f"{it['guidance']:g}",
                    _number(it["images_per_s"], ".2f"),
                    _number(it.get("forward_ms_per_image"), ".1f"),
                    _percent(it.get("mfu")),
                    *(_percent(share.get(part)) for part in ("encode", "denoise", "decode", "publish")),
                    _number(it.get("peak_gib"), ".0f"),
                ]
            )
    header = ["row", "CFG", "images/s", "forward ms/image", "MFU", "encode", "denoise", "decode", "publish", "GiB"]
    return table(header, lines)


def trainers(rows: Rows) -> str:
    lines = [_trainer(row["figures"][0]) for name, row in rows.items() if name.startswith(("train-", "scaling-"))]
    header = [
        "trains",
        "GPUs",
        "batch",
        "checkpointing",
        "images/GPU/s",
        "ms a step and image",
        "optimizer ms",
        "MFU",
        "GiB",
    ]
    return table(header, lines)


def _trainer(it: Mapping[str, Any]) -> list[str]:
    return [
        _trains(it["mode"], it.get("quantization")),
        str(it["world_size"]),
        f"{it['batch']} × {it['micro_batches']}",
        it["checkpointing"],
        *(
            [_number(it["images_per_s_and_rank"], ".2f"), _number(it["ms_per_row"], ".1f")]
            if "mfu" in it
            else ["out of memory", NONE]
        ),
        _number(it.get("optimizer_ms"), ".0f"),
        _percent(it.get("mfu")),
        _number(it.get("peak_gib"), ".0f"),
    ]


def _trains(mode: str, quantization: str | None) -> str:
    return f"{mode}, fp8" if quantization == "fp8" else mode


def scaling(rows: Rows) -> str:
    """The same 32 images an update on more GPUs."""
    names = [name for name in ("train-lora-1", "scaling-2", "scaling-4") if name in rows]
    figures = [rows[name]["figures"][0] for name in names]
    totals = [it["images_per_s_and_rank"] * it["world_size"] for it in figures if "mfu" in it]
    lines = [
        [
            str(it["world_size"]),
            f"{total:.2f}",
            f"{total / totals[0]:.2f}",
            _percent(total / totals[0] / it["world_size"]),
        ]
        for it, total in zip(figures, totals, strict=False)
    ]
    return table(["GPUs", "images/s", "speed-up", "efficiency"], lines)


def published(rows: Rows) -> str:
    """Weight updates by their receivers; then the kills of a receiver, where they are measured."""
    header = ["model", "trainer ranks", "receivers", "GB", "sender s", "verified s", "GB/s"]
    tables = [_publish_table(rows, ("publish", "publish-3"), header)]
    header = [*header[:4], "sender free s", "verified again s"]
    tables.append(_publish_table(rows, ("publish-check", "publish-check-3"), header))
    return "\n\n".join(filter(None, tables)) or "Not measured."


def _publish_table(rows: Rows, names: Sequence[str], header: list[str]) -> str:
    """Rows that do not name their receivers have one."""
    figures = [{"receivers": "1", **it} for name in names if name in rows for it in rows[name]["figures"]]
    return table(header, [[str(it[column]) for column in header] for it in figures]) if figures else ""


def parallel(rows: Rows) -> str:
    """One video on several GPUs."""
    if "parallel" not in rows:
        return "Not measured."
    lines = [
        [
            degree,
            f"{it['forward_s']:.2f}",
            f"{it['step_s']:.2f}",
            f"{it['speed_up']:.2f}",
            _percent(it["speed_up"] / int(degree)),
            f"{it['rms_difference']:.1e}",
            f"{it['peak_gib']:.0f}",
        ]
        for degree, it in rows["parallel"]["figures"][0]["degrees"].items()
    ]
    header = ["GPUs", "forward s", "step s", "speed-up", "efficiency", "rms difference to one GPU", "GiB"]
    return table(header, lines)


BASE_LOOPS = ("only", "only-4", "idle", "idle-4", "cfg", "cfg-one", "flash", "flash-one", "one", "h100", "compare")
LOOPS: tuple[str, ...] = (
    "loop-lora",
    "loop-only",
    "loop-only-2",
    "loop-only-2-bypass",
    "loop-idle",
    "loop-idle-bypass",
    "loop-omni",
    "loop-lora-cfg",
    "loop-full",
    "loop-full-fp8",
    "loop-full-fp8-selective",
)
LOOPS += tuple(f"loop-base-{name}" for name in BASE_LOOPS)


def loops(rows: Rows) -> str:
    lines = []
    for name in LOOPS:
        for it in rows[name]["figures"][:1] if name in rows else ():
            seen, settings = it["services"], it["settings"]
            trains = _trains(settings["mode"], settings.get("trainer_quantization"))
            lines.append(
                [
                    f"{trains}, CFG {settings['guidance']:g}, {_sampler(settings)}{_card(rows[name])}",
                    f"{settings['rollouts']} + {settings['trainers']}",
                    str(settings["images"]),
                    f"{seen['step_s']:.1f}",
                    f"{seen['images_per_gpu_s']:.2f}",
                    *(f"{seen['seconds'][phase]:.1f}" for phase in PHASES),
                    *(_number(seen["published"].get(part), ".2f") for part in ("drain", "transfer")),
                    _percent(seen["rollout_idle"]),
                    _percent(seen["trainer_idle"]),
                    _percent(seen["overlap"]),
                    _percent(seen["others"].get("perf/mfu/actor")),
                ]
            )
    header = ["job", "rollouts + trainers", "images a step", "step s", PER_GPU, *PHASES, "drain", "paused to verified"]
    return table([*header, "rollouts idle", "trainer idle", "overlap", "trainer MFU"], lines)


def _card(row: Mapping[str, Any]) -> str:
    """The accelerator, where it is not an H200."""
    devices = str(row.get("machine", {}).get("devices", ""))
    return "" if "H200" in devices or not devices else f", {devices}"


def _sampler(settings: Mapping[str, Any]) -> str:
    engine = str(settings["engine"])
    found = {"idle": f"{engine} and idle trainer", "only": "trainer alone"}.get(settings.get("samples", "no"), engine)
    marks = ["fp8 base"] * (settings.get("base") == "fp8") + ["merged"] * (settings.get("adapter") == "merged")
    marks += ["old log-probs of the rollout"] * (settings.get("old_log_probs") == "rollout")
    tail = settings.get("tail_steps")
    return ", ".join([found, *marks, *([f"tail of {tail} steps"] if tail else [])])


def compared(rows: Rows) -> str:
    if "loop-compare" not in rows:
        return "Not measured."
    it = rows["loop-compare"]["figures"][0]
    lines = [
        [
            title,
            f"{it[name]['step_s']:.2f}",
            f"{it[name]['images_per_gpu_s']:.3f}",
            *(f"{it[name]['seconds'][phase]:.2f}" for phase in PHASES[3:]),
        ]
        for name, title in (("services", "as services"), ("one_process", "in one process"))
    ]
    return (
        table(["how", "step s", PER_GPU, *PHASES[3:]], lines)
        + f"\n\nServices have {it['ratio']:.3f} of its throughput, at {it['settings']['images']} images a step."
    )


def killed(rows: Rows) -> str:
    """Throughput step by step around the kill."""
    if "loop-kill" not in rows:
        return "Not measured."
    it = rows["loop-kill"]["figures"][0]
    seen, images = it["services"], it["settings"]["images"]
    lines = [
        [
            str(step),
            f"{seconds:.1f}",
            f"{images / seconds:.2f}",
            "a rollout is killed" if step == seen["kill"]["step"] else "",
        ]
        for step, seconds in enumerate(seen["step_s_each"])
    ]
    back = seen["kill"]["back_after_s"]
    told = "It did not come back in these steps." if back is None else f"It serves again {back:.0f} s later."
    return table(["step", "seconds", "images/s", ""], lines) + f"\n\n{told}"


def proofs(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        for it in row["figures"] if name.startswith("proof") else ():
            seeds, settings = it["seeds"], it["settings"]
            lines.append(
                [
                    it["recipe"],
                    settings["engine"],
                    "CPU" if settings["devices"] == ["cpu"] else f"{len(settings['devices'])} GPUs",
                    str(settings["seed"]),
                    f"{it['before']:.3f} → {it['after']:.3f}",
                    f"{seeds['mean']:.3f} ({seeds['low']:.3f} … {seeds['high']:.3f})",
                    _beside(it["after"], seeds),
                    ", ".join(f"{reward:.2f}" for _, reward in it["curve"]),
                ]
            )
    header = ["recipe", "engine", "devices", "seed", "held-out reward", "diffusers' seeds after", "inside", "curve"]
    return table(header, lines)


def _beside(after: float, seeds: Mapping[str, float]) -> str:
    """Whether a result, with three digits as seeds have, lies inside their spread, else how far outside."""
    above, below = round(after, 3) - seeds["high"], seeds["low"] - round(after, 3)
    if above > 0:
        return f"{above:.3f} above"
    return f"{below:.3f} below" if below > 0 else "yes"


def gaps(rows: Rows) -> str:
    measured = [rows[name]["figures"] for name in ("gap", "gap-omni") if name in rows]
    figures = [it for found in measured for it in found if "rollout" in it]
    if not figures:
        return "Not measured."
    names = ("mean", "p99", "max", "beyond_clip", "exact")
    lines = [
        [engine_of(it["rollout"]), it["rollout"], it["trainer"], *(_number(it.get(name), ".2e") for name in names)]
        for it in figures
    ]
    return table(["engine", "rollout", "trainer", *names], lines)


def engine_of(variant: str) -> str:
    """Engine of a variant of bench.speed.gap."""
    return "vllm-omni" if variant.startswith("vllm-omni") else "diffusers"


def memory(rows: Rows) -> str:
    """Peaks of the measured rows next to the predictions of `flowfleet plan` (bench.speed.memory)."""
    figures = rows["memory"]["figures"] if "memory" in rows else []
    lines = [
        [
            it["row"],
            it["of"],
            f"{it['measured']:.1f}",
            f"{it['predicted']:.1f}",
            f"{it['predicted'] / it['measured'] - 1:+.1%}",
        ]
        for it in figures
    ]
    return table(["row", "of", "measured GiB", "predicted GiB", "difference"], lines) if lines else "Not measured."


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(float(value), form)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"
