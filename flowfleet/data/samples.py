"""The name of a sample, the same in logs, reward services and the trainer's messages."""

from flowfleet.proto.common_pb2 import SampleId


def sample_name(sample: SampleId) -> str:
    """job/step/group/index."""
    return f"{sample.job_id}/{sample.step}/{sample.group}/{sample.index}"
