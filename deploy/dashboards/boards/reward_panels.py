"""Rows of the board Rewards: what each reward of a job gave, what became of failures, shadows, and judges."""

from __future__ import annotations

from typing import Any, Final

from deploy.dashboards.model import Panel, Row, Threshold, chart

RATE: Final = "[$__rate_interval]"
NO_SHADOW: Final = "jobs without a shadow"
NO_JUDGE: Final = "fleets without a reward that asks a judge"


def _of_rows(what: str, shown: str = "") -> tuple[str, str]:
    """The gauges of steps that are of one reward."""
    gauge = f"flowfleet_critic_reward_score_{what}"
    return f"max by (job, reward) ({gauge}{{@job}})", f"{{{{job}}}} {{{{reward}}}}{shown}"


def _counted(name: str, label: str = "") -> tuple[str, str]:
    """Reads a counter of the controller; 0 for rewards that are called but not counted yet."""
    by = f"reward, {label}" if label else "reward"
    found = f"sum by ({by}) (rate(flowfleet_controller_reward_{name}{{@all}}{RATE}))"
    none = f"0 * sum by (reward) (rate(flowfleet_reward_calls_total{{@all}}{RATE}))"
    return f"{found} or on (reward) ({none})", f"{{{{reward}}}} {{{{{label}}}}}" if label else "{{reward}}"


def _shadow(title: str, description: str, *queries: tuple[str, str], **more: Any) -> Panel:
    return chart(title, description, *queries, empty_because=NO_SHADOW, **more)


def _judge(title: str, description: str, *queries: tuple[str, str], **more: Any) -> Panel:
    return chart(title, description, *queries, empty_because=NO_JUDGE, width=6, minimum=0, **more)


def _judge_rate(name: str, by: str) -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate(flowfleet_reward_judge_{name}{{@all}}{RATE}))"


def _of_shadow(name: str) -> tuple[str, str]:
    return f"max by (job, shadow) (flowfleet_controller_reward_shadow_{name}{{@job}})", "{{job}} {{shadow}}"


def _shadow_samples(count: str, shown: str) -> tuple[str, str]:
    name = f"flowfleet_controller_reward_shadow_{count}_samples_total"
    return f"sum by (job, shadow) (rate({name}{{@job}}{RATE}))", f"{{{{job}}}} {{{{shadow}}}} {shown}"


EACH_REWARD = Row(
    "Each reward of a job, raw",
    (
        chart(
            "Mean score",
            "Of each reward over the samples of a step, before clip, weight and gates. One that rises while the others "
            "or the held-out reward fall is hacked.",
            _of_rows("mean"),
            key=True,
        ),
        chart("Spread", "Standard deviation of each reward over the samples of a step.", _of_rows("std"), minimum=0),
        chart(
            "Samples without this reward",
            "Trained on without it, because it was skipped.",
            _of_rows("missing"),
            minimum=0,
        ),
    ),
)

FAILURES = Row(
    "Failures and gates",
    (
        chart(
            "Failures waited for",
            "A second, of the rewards of jobs. Each holds back the step until it is answered or given up.",
            _counted("failures_total"),
            width=6,
            minimum=0,
        ),
        chart(
            "Samples given up",
            "A second, after timeouts.rewards_s, by what followed: pause, drop or skip.",
            _counted("given_up_samples_total", "policy"),
            width=6,
            minimum=0,
        ),
        chart(
            "Answers without a score",
            "Samples a second, by why: the service's own error, or an answer that breaks the contract.",
            _counted("rejected_samples_total", "fault"),
            width=6,
            minimum=0,
        ),
        chart(
            "Samples gated",
            "A second, by what the gate did: zero or mask.",
            _counted("gated_samples_total", "action"),
            width=6,
            minimum=0,
        ),
    ),
)

SHADOWS = Row(
    "Shadows, next to the rewards that they may replace",
    (
        _shadow(
            "Rank correlation",
            "Spearman over the samples of the last 64 groups.",
            _of_shadow("spearman"),
            minimum=-1,
            maximum=1,
        ),
        _shadow(
            "Same order in groups",
            "Share of pairs inside groups that both order alike; 0.5 is what knowing nothing gives.",
            _of_shadow("agreement"),
            minimum=0,
            maximum=1,
        ),
        _shadow(
            "Samples of shadows",
            "A second: scored, failed, and left out because the shadow is too slow.",
            _shadow_samples("scored", "scored"),
            _shadow_samples("failed", "failed"),
            _shadow_samples("left_out", "left out"),
            minimum=0,
        ),
    ),
)

JUDGES = Row(
    "Judges",
    (
        _judge(
            "Calls to judges",
            "A second, by server and outcome; cancelled: the caller left.",
            (_judge_rate("calls_total", "server, outcome"), "{{server}} {{outcome}}"),
            unit="ops",
        ),
        _judge(
            "Seconds of a judge's answer",
            "Median and 99th percentile, of answered calls.",
            *(
                (
                    f"histogram_quantile({quantile / 100}, {_judge_rate('call_seconds_bucket', 'le, server')})",
                    f"{{{{server}}}} p{quantile}",
                )
                for quantile in (50, 99)
            ),
            unit="s",
        ),
        _judge(
            "Calls at a judge, and its limit",
            "Calls that the servers have, and the limit that adapts to their latency, summed over the rewards' pods.",
            ("sum by (server) (flowfleet_reward_judge_in_flight{@all})", "{{server}} in flight"),
            ("sum by (server) (flowfleet_reward_judge_concurrency_limit{@all})", "{{server}} limit"),
        ),
        _judge(
            "Circuit breakers",
            "0 closed, 1 half open, 2 open: the server is left alone. The worst of the rewards' pods.",
            ("max by (server) (flowfleet_reward_judge_breaker{@all})", "{{server}}"),
            maximum=2,
            thresholds=(Threshold(1, "yellow"), Threshold(2, "red")),
        ),
        _judge(
            "Answers of judges, by how they were read",
            "A second: from log-probabilities, parsed from the text, or not to be read.",
            (_judge_rate("answers_total", "outcome"), "{{outcome}}"),
        ),
        _judge(
            "Retries",
            "A second. A retry is refused when they are too large a share of all.",
            (_judge_rate("retries_total", ""), "retries"),
            (_judge_rate("retries_refused_total", ""), "retries refused"),
        ),
        _judge(
            "Questions answered from the cache",
            "Share of all questions.",
            (
                f'sum (rate(flowfleet_reward_judge_cache_total{{@all, outcome="hit"}}{RATE}))'
                f" / (sum (rate(flowfleet_reward_judge_cache_total{{@all}}{RATE})) > 0)",
                "hits",
            ),
            unit="percentunit",
            maximum=1,
        ),
        _judge(
            "Tokens of judges",
            "A second, as the servers count them.",
            (_judge_rate("tokens_total", "kind"), "{{kind}}"),
        ),
    ),
)
