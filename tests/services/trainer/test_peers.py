"""A trainer gives its model to new replicas."""

from __future__ import annotations

from pathlib import Path

from flowfleet.job.fingerprints import fingerprint
from flowfleet.peers import Peers
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from tests.services.trainer.processes import Launch, Trainer
from tests.services.trainer.steps import make_spec


async def test_a_replica_takes_the_model_of_a_trainer(
    tiny_qwen_image: Path, launch: Launch, redis_url: str, tmp_path: Path
) -> None:
    path = str(tiny_qwen_image)
    trainer: Trainer = launch(Trainer, make_spec(tiny_qwen_image), tmp_path)
    client = connect(redis_url)
    assert await client.lrange(keys.model_holders(path), 0, -1) == []
    trainer.configure()
    assert await client.lrange(keys.model_holders(path), 0, -1) == [trainer.address().encode()]
    replica = Peers(client, tmp_path / "copies")
    replica.address = "127.0.0.1:1"
    copy = await replica.model(path, fingerprint(path))
    assert copy.is_relative_to(tmp_path / "copies")
    assert fingerprint(copy) == fingerprint(path)
    await replica.close()
    assert trainer.end() == 0
    assert await client.lrange(keys.model_holders(path), 0, -1) == []
    await client.aclose()
