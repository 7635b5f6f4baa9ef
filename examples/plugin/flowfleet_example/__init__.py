"""This plugin's additions to Flowfleet. Free of torch, as the controller that reads it is."""

from flowfleet.algorithms.registry import Algorithm, Loss, Step, register_algorithm, register_loss, register_step
from flowfleet.models.registry import ModelFamily, register

register_step(Step("sit_sde", "flowfleet_example.steps:sit_sde_scales"))

register_loss(
    Loss(
        "cispo",
        "flowfleet_example.losses:cispo",
        "policy",
        reads=("clip_nats",),
        defaults={"clip_nats": 0.7},
        needs_gaussian=True,
    )
)

register_algorithm(
    Algorithm(
        "cispo",
        "CISPO",
        "https://arxiv.org/abs/2506.13585",
        "REINFORCE with importance weights that are cut off above, so that no sample stops teaching.",
        loss="cispo",
        defaults={"rollout.noise.type": "sit_sde", "rollout.noise.eta": 1.0, "trainer.updates_per_step": 2},
    )
)

register(
    ModelFamily(
        "OvisImagePipeline",
        "Ovis-Image",
        "flowfleet_example.ovis_image:OvisImageAdapter",
        max_sequence_length=256,
    )
)
