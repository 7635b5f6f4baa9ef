"""CPU threads of an engine: its own, or the trainer's where both must round alike."""

import torch

from flowfleet.proto.rollout_pb2 import ModelSpec
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.local import copied


async def test_a_job_that_names_threads_computes_with_them_and_loads_no_other_model(
    engine: DiffusersEngine, model: ModelSpec
) -> None:
    async def threads(named: int) -> int:
        asked = copied(model)
        asked.threads = named
        await engine.prepare(asked, None)
        return await engine._run(engine.pulse.work("look"), torch.get_num_threads)

    own = await threads(0)
    loaded = engine._adapter
    assert await threads(own + 1) == own + 1
    assert await threads(0) == own
    assert engine._adapter is loaded
