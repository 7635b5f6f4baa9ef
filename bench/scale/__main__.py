"""Rehearses one controller among very many replicas and jobs.

    python -m bench.scale [--replicas 1000] [--jobs 100] [--seconds 120]
    python -m bench.scale --replicas 4 --jobs 2 --processes 1 --prompts 2 --group-size 2 --seconds 3 --generate-s 0.3 \\
        --train-s 0.1 --publish-s 0.05

The table has latencies, the event loop's lag, and answers of REST; the lines after it what each process used.
"""

import resource
import sys
import tempfile
from pathlib import Path

from bench import report
from bench.scale import load
from bench.scale.rehearsal import rehearse


def main() -> int:
    flags = report.parser("scale", __doc__)
    load.add_flags(flags)
    options = flags.parse_args()
    try:
        wanted = load.from_flags(options)
    except ValueError as error:
        flags.error(str(error))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        result = rehearse(wanted, Path(folder) / "run")
    rows = [{"what": what, **row} for what, row in result.pop("latency_ms").items()]
    print(report.table(rows, ["what", "p50", "p99", "max", "n"]))
    print("\n" + report.table(result["processes"], ["process", "cpus", "rss_mb"]))
    rates = ["samples_per_s", "status_calls_per_s", "redis_commands_per_s", "redis_mb"]
    print("\n" + report.table([result], rates))
    report.write("scale", options, [{**result, "latency_ms": rows}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
