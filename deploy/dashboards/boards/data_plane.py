"""Do samples and tensors flow?"""

from __future__ import annotations

from deploy.dashboards.model import Board, Row, Threshold, chart, stat

MEMORY = "max(flowfleet_redis_memory_bytes{@all}) / max(flowfleet_redis_memory_limit_bytes{@all})"
BLOB_SECONDS = "sum by (le, operation) (rate(flowfleet_blob_operation_seconds_bucket{@all}[$__rate_interval]))"

DATA_PLANE = Board(
    "data-plane",
    "Data plane",
    "Do samples and tensors flow?",
    (
        Row(
            "At a glance",
            (
                stat(
                    "Redis memory",
                    "Share of what it may use: its maxmemory, or the host's memory.",
                    MEMORY,
                    unit="percentunit",
                    thresholds=(Threshold(0.7, "yellow"), Threshold(0.85, "red")),
                    minimum=0,
                    maximum=1,
                ),
                stat(
                    "Oldest pending sample",
                    "Since it was published; more than seconds means that the controller does not take it.",
                    "max by (job) (flowfleet_stream_oldest_pending_age_seconds{@job})",
                    unit="s",
                    legend="{{job}}",
                    thresholds=(Threshold(30, "yellow"), Threshold(120, "red")),
                ),
                stat(
                    "Dead letters",
                    "Stream entries that could not be handled.",
                    'max by (job) (flowfleet_stream_entries{@job, stream="dead_letters"})',
                    legend="{{job}}",
                    thresholds=(Threshold(1, "red"),),
                ),
                stat(
                    "Blob errors a second",
                    "Blobs that could not be read or written: missing, broken, or the store is unreachable.",
                    'sum(rate(flowfleet_blob_operations_total{@all, result="error"}[$__rate_interval])) or vector(0)',
                    unit="ops",
                    thresholds=(Threshold(0.001, "red"),),
                ),
            ),
        ),
        Row(
            "Streams",
            (
                chart(
                    "Stream entries",
                    "References of samples in the job's stream; acknowledged ones are trimmed once an hour.",
                    ("max by (job, stream) (flowfleet_stream_entries{@job})", "{{stream}} {{job}}"),
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Pending entries",
                    "Delivered to the controller and not yet acknowledged.",
                    ("max by (job) (flowfleet_stream_pending_entries{@job})", "{{job}}"),
                    minimum=0,
                ),
                chart(
                    "Age of the oldest pending entry",
                    "0 while none is pending.",
                    ("max by (job) (flowfleet_stream_oldest_pending_age_seconds{@job})", "{{job}}"),
                    unit="s",
                    minimum=0,
                ),
            ),
        ),
        Row(
            "Blobs",
            (
                chart(
                    "Blob bytes a second",
                    "Read and written by controller, rollouts and rank 0 of trainers.",
                    ("sum by (operation) (rate(flowfleet_blob_bytes_total{@all}[$__rate_interval]))", "{{operation}}"),
                    unit="Bps",
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Blob operations a second",
                    "By operation and how it ended.",
                    (
                        "sum by (operation, result) (rate(flowfleet_blob_operations_total{@all}[$__rate_interval]))",
                        "{{operation}} {{result}}",
                    ),
                    unit="ops",
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Seconds of a blob operation",
                    "Median and 99th percentile, hashing included.",
                    (f"histogram_quantile(0.5, {BLOB_SECONDS})", "{{operation}} p50"),
                    (f"histogram_quantile(0.99, {BLOB_SECONDS})", "{{operation}} p99"),
                    unit="s",
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Steps held",
                    "Steps whose samples are kept until a checkpoint covers them.",
                    ("max by (job) (flowfleet_job_held_steps{@job})", "{{job}}"),
                    minimum=0,
                ),
                chart(
                    "Age of the oldest held step",
                    "Memory that blobs take grows with it: lower schedule.save_every or keep_last where it is large.",
                    ("max by (job) (flowfleet_job_oldest_held_step_age_seconds{@job})", "{{job}}"),
                    unit="s",
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Bytes of a weight update",
                    "Of the last one, to each replica.",
                    ("max by (job) (flowfleet_perf_published_bytes{@job})", "{{job}}"),
                    unit="bytes",
                    minimum=0,
                ),
            ),
        ),
        Row(
            "Redis",
            (
                chart(
                    "Redis memory",
                    "Used. What it may use is its maxmemory, or the host's memory: the share of it is at the top.",
                    ("max(flowfleet_redis_memory_bytes{@all})", "used"),
                    unit="bytes",
                    minimum=0,
                    key=True,
                ),
                chart(
                    "Redis commands and clients",
                    "Commands a second, and connected clients.",
                    ("max(rate(flowfleet_redis_commands_total{@all}[$__rate_interval]))", "commands a second"),
                    ("max(flowfleet_redis_clients{@all})", "clients"),
                    minimum=0,
                ),
                chart(
                    "Redis network",
                    "Bytes a second in and out.",
                    ("max(rate(flowfleet_redis_received_bytes_total{@all}[$__rate_interval]))", "in"),
                    ("max(rate(flowfleet_redis_sent_bytes_total{@all}[$__rate_interval]))", "out"),
                    unit="Bps",
                    minimum=0,
                ),
            ),
        ),
    ),
)
