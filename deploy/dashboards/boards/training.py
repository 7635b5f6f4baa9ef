"""Is the job learning, and may one trust it?

A job's metrics are on the controller and in part on its trainer, so each is taken as one value a job.
"""

from __future__ import annotations

from typing import Any

from deploy.dashboards.model import Board, Panel, Row, Threshold, chart, stat

NO_GAP = "losses that match velocities, and DPO, have no log-probs to compare"


def of_job(metric: str) -> str:
    return f"max by (job) (flowfleet_{metric}{{@job}})"


def lines(title: str, description: str, *metrics: tuple[str, str], **more: Any) -> Panel:
    """One line a job and metric."""
    return chart(title, description, *((of_job(name), f"{legend} {{{{job}}}}") for name, legend in metrics), **more)


TRAINING = Board(
    "training",
    "Training",
    "Is the job learning, and may one trust it?",
    (
        Row(
            "At a glance",
            (
                stat(
                    "Reward of the last step",
                    "Mean reward of the samples of the last training step.",
                    of_job("critic_rewards_mean"),
                    legend="{{job}}",
                ),
                stat(
                    "Held-out reward",
                    "Mean reward of the held-out prompts at the last validation: same prompts, same noise each time.",
                    of_job("val_reward"),
                    legend="{{job}}",
                    empty_because="a job without data.validation",
                ),
                stat(
                    "Steps done",
                    "Training steps done, of those that the job has.",
                    "max by (job) (flowfleet_job_step{@job}) / max by (job) (flowfleet_job_steps{@job})",
                    unit="percentunit",
                    legend="{{job}}",
                    minimum=0,
                    maximum=1,
                ),
                stat(
                    "Samples dropped",
                    "Share of the job's samples that were dropped instead of trained on. See the reasons below.",
                    "max by (job) (flowfleet_training_samples_dropped{@job}) / (max by (job)"
                    " (flowfleet_training_samples_dropped{@job}) + max by (job) (flowfleet_training_samples{@job}))",
                    unit="percentunit",
                    legend="{{job}}",
                    thresholds=(Threshold(0.05, "yellow"), Threshold(0.2, "red")),
                ),
            ),
        ),
        Row(
            "Reward",
            (
                lines(
                    "Reward of training samples",
                    "Of the samples of each step: mean, and the best and the worst one.",
                    ("critic_rewards_mean", "mean"),
                    ("critic_rewards_max", "max"),
                    ("critic_rewards_min", "min"),
                    width=12,
                    key=True,
                ),
                lines(
                    "Held-out reward",
                    "Of prompts that are not trained on. Training reward that rises without it is overfitting.",
                    ("val_reward", "held-out"),
                    width=12,
                    key=True,
                    empty_because="a job without data.validation",
                ),
                lines(
                    "Groups that teach nothing",
                    "Share of groups whose rewards are all equal: their advantages are 0. Near 1 the reward is "
                    "saturated, "
                    "or too hard for this policy.",
                    ("critic_rewards_zero_std_ratio", "zero std"),
                    unit="percentunit",
                    minimum=0,
                    maximum=1,
                    thresholds=(Threshold(0.5, "yellow"), Threshold(0.9, "red")),
                    key=True,
                ),
                lines(
                    "Spread inside groups",
                    "Mean over groups of the std of their rewards: what the advantages are made of.",
                    ("critic_rewards_std_mean", "std"),
                ),
                lines(
                    "Statistics of held-out images",
                    "Edge density and color entropy of held-out pictures. They move when a policy games its reward.",
                    ("val_edge_density", "edges"),
                    ("val_colour_entropy", "colours"),
                    empty_because="a job without data.validation",
                ),
            ),
        ),
        Row(
            "Update",
            (
                lines(
                    "Clip fraction",
                    "Share of rows outside the clip range, and on which side. Much above 0.3 the steps are too large.",
                    ("actor_pg_clipfrac", "all"),
                    ("actor_pg_clipfrac_higher", "above"),
                    ("actor_pg_clipfrac_lower", "below"),
                    unit="percentunit",
                    minimum=0,
                    key=True,
                    empty_because="losses without a clipped ratio",
                ),
                lines(
                    "Ratio of new to old policy",
                    "Per row (sample × noisy step) of the update: mean, least and greatest. 1 is no change.",
                    ("actor_ratio_mean", "mean"),
                    ("actor_ratio_min", "min"),
                    ("actor_ratio_max", "max"),
                    empty_because="losses without a ratio",
                ),
                lines(
                    "KL",
                    "To the old policy (half the mean squared difference of log-probs), and to the model before "
                    "training "
                    "where algorithm.kl_coef is set (else 0).",
                    ("actor_ppo_kl", "old policy"),
                    ("actor_kl_loss", "reference"),
                    key=True,
                    empty_because="losses without log-probs",
                ),
                lines(
                    "Gradient norm",
                    "Before clipping, over all ranks.",
                    ("actor_grad_norm", "norm"),
                    minimum=0,
                ),
                lines("Learning rate", "Of the optimizer.", ("actor_lr", "lr"), unit="sci", minimum=0),
                lines(
                    "Loss and updates left out",
                    "Of the step; updates whose gradient was not finite are left out and counted.",
                    ("actor_loss", "loss"),
                    ("actor_skipped_updates_total", "skipped so far"),
                ),
            ),
        ),
        Row(
            "Rollout and trainer agree",
            (
                chart(
                    "Log-prob gap",
                    "|log-prob of the trainer − log-prob of the rollout| before the step's first update, and the job's "
                    "limit, above which it pauses (rollout.max_log_prob_gap).",
                    (of_job("rollout_corr_log_ratio_abs_mean"), "mean {{job}}"),
                    (of_job("rollout_corr_log_ratio_abs_p99"), "p99 {{job}}"),
                    (of_job("job_log_prob_gap_limit"), "limit {{job}}"),
                    unit="sci",
                    minimum=0,
                    key=True,
                    empty_because=NO_GAP,
                ),
                lines(
                    "Rows whose gap matters",
                    "Share of rows whose ratio of trainer to rollout is beyond the clip range, and of rows whose "
                    "gap is no "
                    "finite number. Both are 0 in a healthy job.",
                    ("rollout_corr_beyond_clip", "beyond the clip range"),
                    ("rollout_corr_not_finite", "not finite"),
                    unit="percentunit",
                    minimum=0,
                    empty_because=NO_GAP,
                ),
                chart(
                    "Staleness",
                    "Versions between sampling and training, and the job's limit (schedule.max_staleness).",
                    (of_job("training_off_policy_trajectory_staleness_mean"), "mean {{job}}"),
                    (of_job("training_off_policy_trajectory_staleness_max"), "max {{job}}"),
                    (of_job("job_staleness_limit"), "limit {{job}}"),
                    minimum=0,
                ),
            ),
        ),
        Row(
            "Samples",
            (
                chart(
                    "Samples trained on",
                    "Of the job so far.",
                    ("max by (job) (flowfleet_job_samples_trained_total{@job})", "{{job}}"),
                    width=12,
                    minimum=0,
                ),
                chart(
                    "Samples dropped by reason",
                    "Of the job so far. Each has its reason; none is lost.",
                    (
                        "max by (job, reason) (flowfleet_job_samples_dropped_total{@job})"
                        " or on (job) (0 * max by (job) (flowfleet_job_samples_trained_total{@job}))",
                        "{{reason}} {{job}}",
                    ),
                    width=12,
                    minimum=0,
                ),
            ),
        ),
    ),
)
