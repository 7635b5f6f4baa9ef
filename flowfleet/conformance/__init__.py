"""Does a reward service keep to its contract (protos/flowfleet/v1/reward.proto)? Asked over gRPC alone.

    report = conformance.run("grpc://127.0.0.1:7000", Options(prompt='a sign that says "OPEN"'))
    assert report.ok, report.text()

`checks` has the rules, one function each; `session` what they ask with; `media` the pictures and videos that they send;
`report` what comes out. `flowfleet check-reward` is the same on the command line.
"""

from flowfleet.conformance.report import Report, Result, Status
from flowfleet.conformance.session import Options
from flowfleet.conformance.suite import check, run

__all__ = ["Options", "Report", "Result", "Status", "check", "run"]
