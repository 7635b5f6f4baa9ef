"""What a policy asks of rollouts: how samples are drawn that are trained on, and those that are held out."""

from flowfleet.job.spec import parse_job
from services.controller.job.policies import FlowPolicy


def test_held_out_samples_have_a_size_of_their_own() -> None:
    asked = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt", "validation": "v.txt"}}
    asked |= {"rollout": {"height": 256, "width": 128}}
    plain = parse_job(asked)
    large = parse_job({**asked, "schedule": {"validation_height": 512, "validation_steps": 30}})
    for spec, height in ((plain, 256), (large, 512)):
        trained, shown = FlowPolicy().trained(spec, 0).sampling, FlowPolicy().validated(spec).sampling
        assert (trained.height, trained.width, trained.num_inference_steps) == (256, 128, 10)
        assert (shown.height, shown.width) == (height, 128)
