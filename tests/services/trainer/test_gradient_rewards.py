"""Losses that train on a reward's gradient, against plain PyTorch that goes through decoder and reward itself; what
happens where a reward fails; and steps that are applied again."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.data.blobs import SyncBlobs
from flowfleet.data.trajectories import FinalLatents, Trajectory
from flowfleet.errors import FlowfleetError, Full, Unavailable
from flowfleet.job.spec import JobSpec
from flowfleet.models.families.hunyuan_image3.vae import HunyuanImage3Vae
from flowfleet.models.registry import adapter_for
from flowfleet.proto import trainer_pb2
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from flowfleet.rewards.failures import RewardRefused, RewardUnavailable
from flowfleet.rewards.failures import reward_of as reward_named
from flowfleet.seeds import derive_seed
from recipes.tiny_unified.hunyuan_image3 import CONFIG
from services.reward.execution.batcher import Limits
from services.trainer.parallel import ranks as of_ranks
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.gradients.store import GradientStore, RowGradient
from services.trainer.worker import Worker
from tests.services.trainer.gradient_service import BAD, Known, reward_of, served, with_rewards
from tests.services.trainer.oracle import Oracle
from tests.services.trainer.processes import Launch, Trainer
from tests.services.trainer.steps import JOB, PROMPTS, Drawer, make_spec
from tests.services.trainer.test_service import curve
from tests.services.trainer.workers import make_worker, trained_of
from tests.tiny_models import make_tiny

ALGORITHMS: dict[str, dict[str, Any]] = {
    "refl": {"name": "refl"},
    "refl_ceiling": {"name": "refl", "reward_ceiling": 0.0},
    "srpo": {"name": "srpo", "num_noise_levels": 2},
    "srpo_relative": {
        "name": "srpo",
        "positive_words": ["Real", "Detailed photo"],
        "negative_words": ["Oily"],
        "relative_weight": 0.5,
        "align_step": 0.2,
        "discount_shift": 2.0,
    },
}
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3}


class GradientOracle(Oracle):
    """One graph from the weights through velocity, decoder and reward."""

    def __init__(self, spec: JobSpec, files: SyncBlobs) -> None:
        super().__init__(spec, files)
        family = adapter_for(spec.model.path)
        self.decoder: Any = family.load(spec.model.path, dtype=torch.float32, components=("vae",))

    def _loss(self, items: Sequence[TrainSample], step: int, update: int, past: int) -> Tensor:
        if self.part.loss == "refl":
            return self._refl(items).mean()
        rounds = range(self.part.num_noise_levels)
        return torch.stack([self._srpo(items, step, k) for k in rounds]).mean()

    def _refl(self, items: Sequence[TrainSample]) -> Tensor:
        (step,) = items[0].sample.sde_steps
        paths = [Trajectory.from_bytes(self.files.get(item.sample.trajectory)) for item in items]
        x, s = torch.stack([path.latents[0] for path in paths]), float(self.schedule.sigmas[step])
        v = self._velocity(self.adapter, x, self.schedule.timesteps[step], items)
        rewards = self._rewards(x - s * v, items, "")
        if self.part.reward_ceiling is not None:
            rewards = torch.where(rewards < self.part.reward_ceiling, rewards, rewards.detach())
        return -rewards + self._tie(v, x, self.schedule.timesteps[step], items)

    def _srpo(self, items: Sequence[TrainSample], step: int, k: int) -> Tensor:
        part, shape = self.part, self.adapter.latent_shape(self.spec.rollout.size)
        clean = torch.stack([FinalLatents.from_bytes(self.files.get(item.sample.trajectory)).latents for item in items])
        places = [(item.sample.id.group, item.sample.id.index) for item in items]
        seeds = [derive_seed(self.spec.seed, "match/noise", step, *place, k) for place in places]
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        flat = torch.tensor([self._sigma(place, step, 0, k) for place in places], dtype=torch.float32)
        low = flat
        flat = torch.tensor([min(value + part.align_step, part.sigma_high) for value in low.tolist()])
        s = flat.reshape(-1, *[1] * len(shape))
        x = (1 - s) * clean + s * noise
        v = self._velocity(self.adapter, x, 1000 * flat, items)
        to = low.reshape(-1, *[1] * len(shape))
        image = (x + (to - s) * v - to * noise) / (1 - to)
        count = part.discount_shift * low / (1 + (part.discount_shift - 1) * low)
        if not part.negative_words:
            total = self._rewards(image, items, "")
        else:
            positive, negative = (words[step % len(words)] for words in (part.positive_words, part.negative_words))
            wanted = self._rewards(image, items, f"{positive}. ")
            total = (1 + part.relative_weight) * wanted - self._rewards(image, items, f"{negative}. ")
        return -count * total + self._tie(v, x, 1000 * flat, items)

    def _rewards(self, image: Tensor, items: Sequence[TrainSample], words: str) -> Tensor:
        pixels = ((self._pixels(image) + 1) / 2).clamp(0, 1)
        texts = [words + PROMPTS[item.sample.id.group] for item in items]
        return torch.stack([reward_of(one, text) for one, text in zip(pixels, texts, strict=True)])

    def _pixels(self, image: Tensor) -> Tensor:
        """Decodes by the VAE itself, diffusers' or HunyuanImage-3.0's, with latents scaled as pipelines do."""
        decoder, size = self.decoder, self.spec.rollout.size
        vae = decoder.vae
        if isinstance(vae, HunyuanImage3Vae):
            pixels: Tensor = vae.decode(image / CONFIG["vae"]["scaling_factor"])
            return pixels
        config = vae.config
        if image.ndim == 3:
            image = decoder.pipeline._unpack_latents(image, size.height, size.width, decoder.pipeline.vae_scale_factor)
            image = image if image.ndim == 4 else image[:, :, 0]
            mean, std = (torch.tensor(config[name]).reshape(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
            pixels = vae.decode((image * std + mean)[:, :, None], return_dict=False)[0][:, :, 0]
        else:
            pixels = vae.decode(image / config.scaling_factor + (config.shift_factor or 0), return_dict=False)[0]
        return pixels

    def _tie(self, v: Tensor, x: Tensor, timestep: Tensor, items: Sequence[TrainSample]) -> Tensor:
        with torch.no_grad():
            reference = self._velocity(self.reference, x, timestep, items)
        return self.part.kl_coef * ((v - reference) ** 2).flatten(1).mean(dim=1)


def job(path: Path, algorithm: dict[str, Any], **trainer: Any) -> JobSpec:
    return make_spec(
        path,
        rewards={"ocr": {"weight": 0.0}, "judge": {}},
        algorithm=algorithm,
        rollout={"window": {"strategy": "fixed", "size": 1, "low": 2}},
        trainer={"optimizer": OPTIMIZER, "deterministic": False, **trainer},
    )


def drawn(drawer: Drawer, files: SyncBlobs, step: int, address: str) -> TrainStepRequest:
    request = drawer.draw(files, step)
    with_rewards(request, address, PROMPTS)
    return request


def steps(worker: Worker, drawer: Drawer, files: SyncBlobs, address: str, count: int = 2) -> dict[str, float]:
    for step in range(count):
        response = worker.train(drawn(drawer, files, step, address))
        assert not response.reward_failure, response.reward_failure
    return dict(response.metrics)


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps_equal_one_graph_through_decoder_and_reward(
    name: str, mode: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    assert_two_steps(job(tiny_qwen_image, ALGORITHMS[name] | {"kl_coef": 0.01}, mode=mode), ranks, files, tmp_path)


@pytest.mark.parametrize("together", [1, 2])
def test_pictures_are_decoded_as_many_together_as_have_room(
    together: int,
    tiny_qwen_image: Path,
    ranks: Ranks,
    files: SyncBlobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of a micro-batch: one after the other, or two and the last."""
    monkeypatch.setattr("flowfleet.rewards.gradients.DECODED_AT_ONCE", together * 32 * 32)
    assert_two_steps(job(tiny_qwen_image, ALGORITHMS["srpo"] | {"kl_coef": 0.01}), ranks, files, tmp_path)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_hunyuan_image3_learns_by_srpo_as_one_graph_says(
    mode: str, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Through the mixture of experts and its own VAE, whose activations the trainer computes again."""
    path = make_tiny("hunyuan_image3", tmp_path / "model")
    spec = job(path, ALGORITHMS["srpo_relative"] | {"kl_coef": 0.01}, mode=mode, gradient_checkpointing="full")
    assert_two_steps(spec, ranks, files, tmp_path)


def assert_two_steps(spec: JobSpec, ranks: Ranks, files: SyncBlobs, tmp_path: Path) -> None:
    worker, oracle, drawer = make_worker(spec, ranks, files, tmp_path), GradientOracle(spec, files), Drawer(spec)
    before = trained_of(worker)
    with served() as reward:
        for step in range(2):
            request = drawn(drawer, files, step, reward.address)
            metrics, losses = worker.train(request).metrics, oracle.train(request)
            assert metrics["actor/loss"] == pytest.approx(sum(losses), rel=1e-4, abs=1e-6)
    after = trained_of(worker)
    assert any(not torch.equal(after[each], before[each]) for each in after)
    for each, tensor in oracle.state().items():
        torch.testing.assert_close(after[each], tensor, rtol=1e-4, atol=4e-5)


def test_calls_are_cut_at_what_the_service_takes(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    monkeypatch.setattr("services.reward.server.MAX_GRADIENT_BYTES", 3 * 32 * 32 * 4 * 2 + 100)  # two pictures
    with served(limits=Limits(max_batch=2)) as reward:  # which keeps calls of two and one apart
        steps(worker, drawer, files, reward.address, 1)
    assert sorted(reward.scorer.numbers) == [1, 1, 2, 2]  # two micro-batches of three


def test_a_reward_that_is_gone_changes_nothing_and_is_named(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["srpo"])
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    before = trained_of(worker)
    with served() as reward:
        request = drawn(drawer, files, 0, reward.address)
        reward.stop()
        gone = worker.train(request)
    assert gone.reward_failure.startswith(f"rewards.judge: service 'judge' at {reward.address} cannot be reached")
    assert (gone.failed_reward, gone.is_permanent) == ("judge", False)
    nowhere = worker.train(drawn(drawer, files, 0, ""))
    assert nowhere.reward_failure == "rewards.judge: service 'judge' has no replica that is ready"
    assert worker.job is not None
    assert worker.job.record.version == 0
    assert all(torch.equal(trained_of(worker)[name], tensor) for name, tensor in before.items())
    with served() as reward:
        assert not worker.train(drawn(drawer, files, 0, reward.address)).reward_failure
    assert worker.job.record.version == 1


class Plain(Known):
    gives_gradient = False


def test_a_reward_without_gradient_is_refused_by_name(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    with served(Plain()) as reward:
        response = worker.train(drawn(drawer, files, 0, reward.address))
    assert (response.failed_reward, response.is_permanent) == ("judge", True)
    assert "gives no gradient (known 1), and the job's loss trains on it: use a reward that" in response.reward_failure


def test_a_sample_without_a_gradient_is_counted_and_teaches_nothing(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    with served() as reward:
        request = drawn(drawer, files, 0, reward.address)
        request.prompts[1].text = BAD
        metrics = worker.train(request).metrics
    assert metrics["actor/without_gradient"] == pytest.approx(1 / len(PROMPTS))
    assert metrics["actor/grad_norm"] > 0


def test_a_reward_that_answers_for_no_sample_changes_nothing(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """However samples fall into micro-batches; asked again, they may have gradients."""
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"micro_batch_size": 1})})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    before = trained_of(worker)
    with served() as reward:
        request = drawn(drawer, files, 0, reward.address)
        texts = [prompt.text for prompt in request.prompts]
        for prompt in request.prompts:
            prompt.text = BAD
        failure = worker.train(request)
        assert failure.reward_failure.startswith("rewards.judge: service 'judge': ")
        assert (failure.failed_reward, failure.is_permanent) == ("judge", False)
        assert all(torch.equal(trained_of(worker)[name], tensor) for name, tensor in before.items())
        for prompt, text in zip(request.prompts, texts, strict=True):
            prompt.text = text
        assert worker.train(request).metrics["actor/without_gradient"] == 0


def test_a_step_applied_again_goes_without_the_same_samples(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that had an error for a sample may answer now: the step is the one that was applied."""
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    drawer, results = Drawer(spec), []
    with served() as reward:
        request = drawn(drawer, files, 0, reward.address)
        failing = request.prompts[1].text
        for bad in (failing, BAD):
            monkeypatch.setattr("tests.services.trainer.gradient_service.BAD", bad)
            worker = make_worker(spec, ranks, files, tmp_path)
            assert worker.train(request).metrics["actor/without_gradient"] == pytest.approx(1 / len(PROMPTS))
            results.append(trained_of(worker))
    first, second = results
    assert all(torch.equal(first[each], second[each]) for each in first)


@pytest.mark.parametrize("name", ["refl", "srpo_relative"])
def test_a_step_applied_again_is_the_same_bit_for_bit_whatever_the_reward_says_now(
    name: str, tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """The second trainer begins where the first did, as after a kill, and the reward has changed meanwhile."""
    spec, drawer = job(tiny_qwen_image, ALGORITHMS[name]), None
    results = []
    with served() as reward:
        for factor in (1.0, -3.0):
            reward.scorer.factor = factor
            worker = make_worker(spec, ranks, files, tmp_path)
            drawer = drawer or Drawer(spec)
            steps(worker, drawer, files, reward.address)
            results.append(trained_of(worker))
        asked = sum(reward.scorer.numbers)
    first, second = results
    assert all(torch.equal(first[each], second[each]) for each in first)
    rows = 2 * 2 * len(PROMPTS)
    assert asked == rows * (2 if "relative" in name else 1)


def test_gradients_of_another_history_are_not_taken(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    drawer = Drawer(spec)
    with served() as reward:
        worker = make_worker(spec, ranks, files, tmp_path)
        worker.train(drawn(drawer, files, 0, reward.address))
        asked = sum(reward.scorer.numbers)
        worker = make_worker(spec, ranks, files, tmp_path)
        other = drawn(drawer, files, 0, reward.address)
        other.samples[0].advantage += 1.0
        worker.train(other)
        assert sum(reward.scorer.numbers) == 2 * asked
        worker = make_worker(spec, ranks, files, tmp_path)
        moved = drawn(drawer, files, 0, reward.address)
        moved.gradient_rewards[0].addresses.append("127.0.0.1:1")
        worker.train(moved)
        assert sum(reward.scorer.numbers) == 2 * asked  # where a reward answers does not count


def test_a_checkpoint_that_covers_a_step_frees_its_gradients(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    spec = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"keep_last": 1})})
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    folder = tmp_path / "checkpoints" / "gradients"
    with served() as reward:
        steps(worker, drawer, files, reward.address)
    assert sorted(path.name.split("-")[1] for path in folder.iterdir()) == ["0", "1"]
    worker.save(trainer_pb2.SaveCheckpointRequest(job_id=JOB))
    assert list(folder.iterdir()) == []


def test_a_disk_that_takes_no_gradients_is_told_as_what_it_is(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    """Not as a reward's failure. The step is applied once the disk is well."""
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    folder = tmp_path / "checkpoints" / "gradients"
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("in the way")
    assert worker.job is not None
    with served() as reward:
        request = drawn(drawer, files, 0, reward.address)
        with pytest.raises(
            Unavailable, match=r"cannot keep the gradients of the step's rewards in .*: repair that disk"
        ):
            worker.train(request)
        assert worker.job.record.version == 0
        folder.unlink()
        assert not worker.train(request).reward_failure
    assert worker.job.record.version == 1


def test_a_full_disk_keeps_no_gradient_and_nothing_half_written(tmp_path: Path) -> None:
    store = GradientStore(tmp_path, 0, "abc")
    folder = tmp_path / "gradients" / "step-0-abc"
    folder.mkdir(parents=True)
    (folder / f".0-0-0.safetensors.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(
        Full, match=r"there is no room for the gradients of the step's rewards in .*: free some of that"
    ):
        store.put("0-0-0", RowGradient(torch.zeros(4), 0.5))
    assert list(folder.iterdir()) == []
    store.put("0-0-0", RowGradient(torch.ones(4), 0.5))
    found = store.get("0-0-0")
    assert found is not None
    assert (found.gradient.tolist(), found.reward, found.is_missing) == ([1.0] * 4, 0.5, False)


@pytest.mark.parametrize("kind", [RewardRefused, RewardUnavailable])
def test_ranks_tell_each_other_whose_reward_failed(kind: type[FlowfleetError]) -> None:
    told = of_ranks._unpack(of_ranks._pack(kind("ocr\x1fis gone: " + "ü" * 5000, "judge")))
    assert type(told) is kind
    assert reward_named(told) == "judge"
    assert str(told).startswith("ocr is gone: üü")
    plain = of_ranks._unpack(of_ranks._pack(Full("no room")))
    assert (type(plain), str(plain), reward_named(plain)) == (Full, "no room", "")


def test_a_step_without_prompts_is_refused(
    tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = job(tiny_qwen_image, ALGORITHMS["refl"])
    worker, drawer = make_worker(spec, ranks, files, tmp_path), Drawer(spec)
    with pytest.raises(Exception, match="step 0 has no prompt for group 0: rewards are asked with it"):
        worker.train(drawer.draw(files, 0))


@pytest.mark.long
def test_a_trainer_killed_in_mid_step_makes_the_same_weights(
    tiny_qwen_image: Path, launch: Launch, blobs: SyncBlobs, tmp_path: Path
) -> None:
    """kill -9 while a later micro-batch waits for its reward; what was asked before the kill is not asked again."""
    spec = job(tiny_qwen_image, ALGORITHMS["srpo"])
    drawer, folders = Drawer(spec), (tmp_path / "calm", tmp_path / "hit")
    for folder in folders:
        folder.mkdir()
    with served() as reward:
        requests = [drawn(drawer, blobs, step, reward.address) for step in range(2)]
        calm: Trainer = launch(Trainer, spec, folders[0])
        calm.configure()
        expected = [curve(calm.train(request)) for request in requests]
        asked = sum(reward.scorer.numbers)
        reward.scorer.hold(after=2)
        hit: Trainer = launch(Trainer, spec, folders[1])
        hit.configure()
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(hit.train, requests[0])
            assert reward.scorer.held.wait(60)
            stored = list((folders[1] / "checkpoints" / "gradients").rglob("*.safetensors"))
            hit.kill()
            assert isinstance(left.exception(60), grpc.RpcError)
        reward.scorer.free()
        assert 0 < len(stored) < 2 * 2 * len(PROMPTS)
        again: Trainer = launch(Trainer, spec, folders[1], name="again")
        again.configure()
        found = [curve(again.train(request)) for request in requests]
    assert found == expected
    assert asked <= sum(reward.scorer.numbers) - asked <= asked + 4  # with the call that the kill cut off
    weights = [trainer.export(folder / "model") for trainer, folder in zip((calm, again), folders, strict=True)]
    first, second = (load_file(next(path.rglob("*.safetensors"))) for path in weights)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
