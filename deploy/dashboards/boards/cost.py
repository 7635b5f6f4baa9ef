"""What does a trained image cost, and where do accelerators idle?

Accelerator-seconds are those that a job held, working or not: the trainer's ranks while it is up and the replicas that
serve it. On CPUs they are seconds of processes.
"""

from __future__ import annotations

from deploy.dashboards.boards.fleet import PHASES, UTILIZATION
from deploy.dashboards.model import Board, Panel, Row, chart, stat

WINDOW = "[10m]"
IMAGES = f"max by (job) (increase(flowfleet_job_samples_trained_total{{@job}}{WINDOW}))"


def per_image(labels: str) -> str:
    """Accelerator-seconds a trained image over the last ten minutes."""
    seconds = f"sum by ({labels}) (increase(flowfleet_job_accelerator_seconds_total{{@job}}{WINDOW}))"
    return f"{seconds} / on (job) group_left () ({IMAGES} > 0)"


def mfu(width: int) -> Panel:
    return chart(
        "Model FLOPs utilization of the trainer",
        "Model FLOPs over time, ranks and the device's peak for dense bf16; of updates, and of forwards without "
        "gradient.",
        ("max by (job) (flowfleet_perf_mfu_actor{@job})", "updates {{job}}"),
        ("max by (job) (flowfleet_perf_mfu_actor_infer{@job})", "forwards {{job}}"),
        unit="percentunit",
        width=width,
        minimum=0,
        maximum=1,
        empty_because="devices whose peak is not known, such as CPUs",
    )


COST = Board(
    "cost",
    "Cost",
    "What does a trained image cost, and where do accelerators idle?",
    (
        Row(
            "At a glance",
            (
                stat(
                    "Accelerator-seconds a trained image",
                    "Held by the job, working or not, over the last ten minutes.",
                    per_image("job"),
                    unit="s",
                    legend="{{job}}",
                ),
                stat(
                    "Accelerator-hours",
                    "That the job held since the controller leads.",
                    "sum by (job) (flowfleet_job_accelerator_seconds_total{@job}) / 3600",
                    unit="h",
                    legend="{{job}}",
                ),
                stat(
                    "Accelerators held",
                    "By the job now: trainer ranks and replicas (on CPUs: processes).",
                    "sum by (job) (rate(flowfleet_job_accelerator_seconds_total{@job}[$__rate_interval]))",
                    legend="{{job}}",
                ),
                stat(
                    "Images trained on",
                    "By the job so far.",
                    "max by (job) (flowfleet_job_samples_trained_total{@job})",
                    legend="{{job}}",
                ),
            ),
        ),
        Row(
            "Of an image",
            (
                chart(
                    "Accelerator-seconds a trained image",
                    "Held by the job over the last ten minutes, and by the throughput of the last step alone.",
                    (per_image("job"), "held, 10 minutes {{job}}"),
                    ("1 / (max by (job) (flowfleet_perf_throughput{@job}) > 0)", "last step {{job}}"),
                    unit="s",
                    width=12,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "By component",
                    "Accelerator-seconds a trained image of rollouts and trainer, over the last ten minutes.",
                    (per_image("job, component"), "{{component}} {{job}}"),
                    unit="s",
                    width=12,
                    stacked=True,
                    minimum=0,
                    key=True,
                ),
            ),
        ),
        Row(
            "Of time",
            (
                chart(
                    "Share of phases",
                    "Of the last step's seconds. Publishing is that of the version before; where phases of several "
                    "steps "
                    "overlap the shares add up to more than 1.",
                    *(
                        (
                            f"max by (job) (flowfleet_timing_s_{name}{{@job}})"
                            " / (max by (job) (flowfleet_timing_s_step{@job}) > 0)",
                            legend,
                        )
                        for name, legend in PHASES
                    ),
                    unit="percentunit",
                    stacked=True,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Utilization of rollouts",
                    "Share of the live replicas' time with samples to make.",
                    (UTILIZATION, "{{pool}}"),
                    unit="percentunit",
                    minimum=0,
                    maximum=1,
                    key=True,
                ),
                chart(
                    "Accelerators held",
                    "By component: trainer ranks while the trainer is up, and replicas that serve the job.",
                    (
                        "sum by (job, component)"
                        " (rate(flowfleet_job_accelerator_seconds_total{@job}[$__rate_interval]))",
                        "{{component}} {{job}}",
                    ),
                    stacked=True,
                    minimum=0,
                    key=True,
                ),
                mfu(12),
                chart(
                    "Trainer's time inside a step",
                    "Reading samples, forwards of the reference and of the policy before the step, and the updates.",
                    ("max by (job) (flowfleet_timing_s_load_samples{@job})", "reading samples"),
                    ("max by (job) (flowfleet_timing_s_ref{@job})", "reference"),
                    ("max by (job) (flowfleet_timing_s_old_log_prob{@job})", "old log-probs"),
                    ("max by (job) (flowfleet_timing_s_update_actor{@job})", "updates"),
                    unit="s",
                    width=12,
                    stacked=True,
                    minimum=0,
                    key=True,
                ),
            ),
        ),
    ),
)
