"""Is the fleet large enough, healthy and busy?"""

from __future__ import annotations

from deploy.dashboards.model import Board, Row, Threshold, chart, stat

PHASES = (
    ("gen", "sampling"),
    ("reward", "scoring after the last sample"),
    ("adv", "advantages"),
    ("train", "training"),
    ("update_weights", "publishing"),
)
HEALTH = (
    ("serving", "green"),
    ("updating", "blue"),
    ("idle", "yellow"),
    ("draining", "purple"),
    ("unknown", "gray"),
    ("lost", "red"),
)
LAG = (("0", "green"), ("1", "yellow"), ("2", "orange"), ("3+", "red"), ("none", "gray"))
UTILIZATION = (
    "sum by (pool) (rate(flowfleet_fleet_busy_seconds_total{@pool}[$__rate_interval]))"
    " / (sum by (pool) (rate(flowfleet_fleet_replica_seconds_total{@pool}[$__rate_interval])) > 0)"
)

FLEET = Board(
    "fleet",
    "Fleet",
    "Is the fleet large enough, healthy and busy?",
    (
        Row(
            "At a glance",
            (
                stat(
                    "Live replicas",
                    "Rollout replicas that answer: idle, serving or updating.",
                    'sum by (pool) (flowfleet_fleet_replicas{@pool, health=~"idle|serving|updating"})',
                    legend="{{pool}}",
                ),
                stat(
                    "Samples waiting",
                    "Samples that may be made now and that no replica was asked for: what pools are scaled by.",
                    "sum by (pool) (flowfleet_job_waiting_samples{@pool})",
                    legend="{{pool}}",
                ),
                stat(
                    "Utilization",
                    "Share of the live replicas' time with samples to make.",
                    UTILIZATION,
                    unit="percentunit",
                    legend="{{pool}}",
                    minimum=0,
                    maximum=1,
                ),
                stat(
                    "Images a second and accelerator",
                    "Of the last step, over its whole time; trainer ranks and replicas are counted (on CPUs: "
                    "processes).",
                    "max by (job) (flowfleet_perf_throughput{@job})",
                    legend="{{job}}",
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                chart(
                    "Replicas by health",
                    "As the controller sees them. Lost: did not answer several times.",
                    ("sum by (health) (flowfleet_fleet_replicas{@pool})", "{{health}}"),
                    stacked=True,
                    colors=HEALTH,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Replicas by versions behind",
                    "Live replicas by how far the weights that they serve are behind the published ones; none: they "
                    "take "
                    "weights, or serve another job.",
                    ("sum by (version_lag) (flowfleet_fleet_replicas_at_version{@pool})", "{{version_lag}}"),
                    stacked=True,
                    colors=LAG,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Policy version served",
                    "By replica; −1 while it serves none.",
                    ("flowfleet_rollout_policy_version{@all}", "{{pod}}"),
                    minimum=-1,
                ),
                chart(
                    "Backlog",
                    "Samples that wait for a replica, and those that replicas were asked for and have not finished.",
                    ("sum by (pool) (flowfleet_job_waiting_samples{@pool})", "waiting {{pool}}"),
                    ("sum by (pool) (flowfleet_fleet_outstanding_samples{@pool})", "asked for {{pool}}"),
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Utilization",
                    "Share of the live replicas' time with samples to make. Low with a backlog: replicas take weights.",
                    (UTILIZATION, "{{pool}}"),
                    unit="percentunit",
                    minimum=0,
                    maximum=1,
                    key=True,
                ),
                chart(
                    "Pods that cannot be placed",
                    "Of pools, rewards and trainers: no node has room for them.",
                    (
                        "sum by (component, name) (flowfleet_unschedulable_pods{@all})"
                        " or (0 * max(flowfleet_controller_leader{@all}))",
                        "{{component}} {{name}}",
                    ),
                    thresholds=(Threshold(1, "red"),),
                    minimum=0,
                ),
            ),
        ),
        Row(
            "Speed",
            (
                chart(
                    "Images a second",
                    "Published by each replica.",
                    (
                        "sum by (pod) (rate(flowfleet_rollout_samples_total{@job}[$__rate_interval]))",
                        "{{pod}}",
                    ),
                    stacked=True,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Images a second and accelerator",
                    "Over whole steps; trainer ranks and replicas are counted.",
                    ("max by (job) (flowfleet_perf_throughput{@job})", "{{job}}"),
                    minimum=0,
                ),
                chart(
                    "Step time by phase",
                    "Seconds of the last step. Publishing is that of the version before; with max_staleness > 0 "
                    "phases of "
                    "several steps overlap.",
                    *((f"max by (job) (flowfleet_timing_s_{name}{{@job}})", legend) for name, legend in PHASES),
                    unit="s",
                    stacked=True,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "What replicas spend their time on",
                    "Seconds a second by part of the sampling, summed over replicas.",
                    (
                        "sum by (part) (rate(flowfleet_rollout_seconds_total{@job}[$__rate_interval]))",
                        "{{part}}",
                    ),
                    stacked=True,
                    minimum=0,
                ),
                chart(
                    "Samples in flight",
                    "Admitted by each replica and not finished.",
                    ("flowfleet_rollout_in_flight{@all}", "{{pod}}"),
                    minimum=0,
                ),
                chart(
                    "Peak memory of the accelerator",
                    "Of each replica, and of the trainer's rank 0, so far.",
                    ("flowfleet_rollout_peak_memory_gib{@all}", "{{pod}}"),
                    ("max by (job) (flowfleet_perf_peak_memory_gib{@job})", "trainer {{job}}"),
                    unit="gbytes",
                    minimum=0,
                ),
            ),
        ),
        Row(
            "Jobs",
            (
                chart(
                    "Jobs by status",
                    "Of the controller, ended ones too.",
                    ("max by (status) (flowfleet_controller_jobs{@all})", "{{status}}"),
                    width=12,
                    minimum=0,
                ),
                chart(
                    "Seconds since the last progress",
                    "Of jobs that run: since a sample, score, step, publishing, checkpoint or validation.",
                    (
                        "time() - max by (job) (flowfleet_job_last_progress_timestamp_seconds{@job})",
                        "{{job}}",
                    ),
                    unit="s",
                    width=12,
                    minimum=0,
                ),
            ),
        ),
    ),
)
