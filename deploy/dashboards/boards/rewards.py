"""Do the rewards answer, and what do they say?"""

from __future__ import annotations

from deploy.dashboards.boards.reward_panels import EACH_REWARD, FAILURES, JUDGES, RATE, SHADOWS
from deploy.dashboards.model import Board, Row, Threshold, chart, heatmap, stat

CALL_SECONDS = f"sum by (le, reward) (rate(flowfleet_reward_call_seconds_bucket{{@all}}{RATE}))"
REQUEST_SECONDS = f"sum by (le, scorer) (rate(flowfleet_reward_request_seconds_bucket{{@all}}{RATE}))"
NONE_YET = f"or on (scorer) (0 * sum by (scorer) (rate(flowfleet_reward_samples_total{{@all}}{RATE})))"

REWARDS = Board(
    "rewards",
    "Rewards",
    "Do the rewards answer, and what do they say?",
    (
        Row(
            "At a glance",
            (
                stat(
                    "Samples scored a second",
                    "By all replicas of each scorer.",
                    f"sum by (scorer) (rate(flowfleet_reward_samples_total{{@all}}{RATE}))",
                    legend="{{scorer}}",
                ),
                stat(
                    "Calls that fail",
                    "Share of the controller's Score calls that end in an error, calls given up left out.",
                    f'sum by (reward) (rate(flowfleet_reward_calls_total{{@all, code!~"OK|CANCELLED"}}{RATE}))'
                    f" / (sum by (reward) (rate(flowfleet_reward_calls_total{{@all}}{RATE})) > 0)"
                    " or on (reward) (0 * sum by (reward) (flowfleet_reward_calls_total{@all}))",
                    unit="percentunit",
                    legend="{{reward}}",
                    thresholds=(Threshold(0.01, "yellow"), Threshold(0.1, "red")),
                ),
                stat(
                    "Samples that wait",
                    "In the queues of the reward services.",
                    "sum by (scorer) (flowfleet_reward_queued_samples{@all})",
                    legend="{{scorer}}",
                ),
                stat(
                    "Deaths of processes",
                    "Processes of the scorers' pools that died in the time shown.",
                    "sum by (scorer) (increase(flowfleet_reward_process_deaths_total{@all}[$__range]))"
                    " or on (scorer) (0 * sum by (scorer) (flowfleet_reward_samples_total{@all}))",
                    legend="{{scorer}}",
                    thresholds=(Threshold(1, "yellow"), Threshold(10, "red")),
                ),
            ),
        ),
        Row(
            "Calls, as the controller sees them",
            (
                chart(
                    "Seconds of a call",
                    "Median, 95th and 99th percentile of Score calls: network, queue and scoring.",
                    *(
                        (f"histogram_quantile({quantile / 100}, {CALL_SECONDS})", f"{{{{reward}}}} p{quantile}")
                        for quantile in (50, 95, 99)
                    ),
                    unit="s",
                    width=12,
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Calls a second by code",
                    "Every code but OK is an error; those that may pass are tried again.",
                    (
                        f"sum by (reward, code) (rate(flowfleet_reward_calls_total{{@all}}{RATE}))",
                        "{{reward}} {{code}}",
                    ),
                    unit="ops",
                    width=12,
                    minimum=0,
                    key=True,
                ),
            ),
        ),
        Row(
            "Scores",
            (
                heatmap(
                    "Distribution of scores",
                    "Scores a second in each range, of all scorers and jobs. One that drifts to its upper end has "
                    "nothing "
                    "more to teach.",
                    f"sum by (le) (rate(flowfleet_reward_score_bucket{{@all}}{RATE}))",
                    key=True,
                ),
                chart(
                    "Samples without a score",
                    "A second, by the scorer's reason. They are dropped, never scored as 0.",
                    (
                        f"sum by (scorer, reason) (rate(flowfleet_reward_errors_total{{@all}}{RATE})) {NONE_YET}",
                        "{{scorer}} {{reason}}",
                    ),
                    width=12,
                    minimum=0,
                    key=True,
                ),
            ),
        ),
        EACH_REWARD,
        FAILURES,
        Row(
            "Services",
            (
                chart(
                    "Seconds of a request in the service",
                    "Median and 99th percentile, the wait for a batch included.",
                    (f"histogram_quantile(0.5, {REQUEST_SECONDS})", "{{scorer}} p50"),
                    (f"histogram_quantile(0.99, {REQUEST_SECONDS})", "{{scorer}} p99"),
                    unit="s",
                    minimum=0,
                ),
                chart(
                    "Samples that wait",
                    "In the queues of the reward services.",
                    ("sum by (scorer) (flowfleet_reward_queued_samples{@all})", "{{scorer}}"),
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Samples being scored",
                    "Of a scorer that asks others, all that it has.",
                    ("sum by (scorer) (flowfleet_reward_in_flight_samples{@all})", "{{scorer}}"),
                    minimum=0,
                ),
                chart(
                    "Samples a second",
                    "Scored or refused.",
                    (f"sum by (scorer) (rate(flowfleet_reward_samples_total{{@all}}{RATE}))", "{{scorer}}"),
                    minimum=0,
                ),
                chart(
                    "Samples in a batch",
                    "Mean; small batches of a model on a GPU waste it: raise --max-wait-ms.",
                    (
                        f"sum by (scorer) (rate(flowfleet_reward_batch_size_sum{{@all}}{RATE}))"
                        f" / (sum by (scorer) (rate(flowfleet_reward_batch_size_count{{@all}}{RATE})) > 0)",
                        "{{scorer}}",
                    ),
                    minimum=0,
                ),
                chart(
                    "Seconds of a batch",
                    "Mean time to decode and score one.",
                    (
                        f"sum by (scorer) (rate(flowfleet_reward_batch_seconds_sum{{@all}}{RATE}))"
                        f" / (sum by (scorer) (rate(flowfleet_reward_batch_seconds_count{{@all}}{RATE})) > 0)",
                        "{{scorer}}",
                    ),
                    unit="s",
                    minimum=0,
                ),
                chart(
                    "Processes busy, and their deaths",
                    "Processes of the pools that work, of those that there are (0: the service's own), and deaths a "
                    "second.",
                    (
                        f"sum by (scorer) (rate(flowfleet_reward_busy_seconds_total{{@all}}{RATE})) {NONE_YET}",
                        "{{scorer}} busy",
                    ),
                    ("sum by (scorer) (flowfleet_reward_processes{@all})", "{{scorer}} processes"),
                    (
                        f"sum by (scorer) (rate(flowfleet_reward_process_deaths_total{{@all}}{RATE})) {NONE_YET}",
                        "{{scorer}} deaths a second",
                    ),
                    minimum=0,
                    key=True,
                ),
            ),
        ),
        SHADOWS,
        JUDGES,
    ),
)
