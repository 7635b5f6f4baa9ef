"""A step whose trainer asks rewards for gradients: where these answer, and what follows when one does not.

The trainer applies nothing then and says why. The step is sent again, less and less often, until `timeouts.rewards_s`
has passed since the first failure; then the job pauses, as for a reward that gives no scores.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from flowfleet.backoff import backoff_s
from flowfleet.job.spec import JobSpec, RewardPart
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import trainer_pb2
from services.controller.fleet.directory import Directory
from services.controller.rewards.failures import RewardFailure, RewardPause, why_failed

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0

Send = Callable[[trainer_pb2.TrainStepRequest], Awaitable[trainer_pb2.TrainStepResponse]]


class GradientRewards:
    """Sends a job's training steps with its rewards' addresses, and pauses the job when a reward fails for long."""

    def __init__(self, directory: Directory, spec: JobSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._spec, self._clock = directory, spec, clock
        self._since: float | None = None
        self._failures = 0

    async def trained(self, request: trainer_pb2.TrainStepRequest, send: Send) -> trainer_pb2.TrainStepResponse:
        """Returns the trainer's answer to a step. Raises RewardFailure while the job waits for a reward that gives no
        gradients, RewardPause when it took too long or a user must change something first."""
        response = await send(self._addressed(request))
        if not response.reward_failure:
            self.reset()
            return response
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._failures += 1
        name = response.failed_reward
        failure = RewardFailure(response.reward_failure, permanent=response.is_permanent)
        patience = self._spec.timeouts.rewards_s
        is_over = now - self._since >= patience
        if is_over or failure.permanent:
            self.reset()
            raise RewardPause(why_failed(name, failure, patience if is_over else None, True))
        failure.again_s = backoff_s(self._failures, FIRST_DELAY_S, MAX_DELAY_S)
        raise failure

    def reset(self) -> None:
        """Counts nothing that failed before."""
        self._since, self._failures = None, 0

    def _addressed(self, request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepRequest:
        """The request with the addresses of today."""
        if not request.gradient_rewards:
            return request
        sent = trainer_pb2.TrainStepRequest()
        sent.CopyFrom(request)
        for reward in sent.gradient_rewards:
            reward.addresses[:] = self._directory.rewards.get(reward.service, ())
        return sent


def trains_on(spec: JobSpec, name: str, part: RewardPart) -> bool:
    """True if the trainer follows a reward's gradient, at some step and for some source of prompts."""
    parts = [spec.data.scoring(source.name, {name: part}).get(name) for source in spec.data.each]
    return spec.trains_on_gradients and any(one.has_influence for one in parts if one is not None)


def told(
    request: trainer_pb2.TrainStepRequest,
    prompts: Sequence[Prompt],
    weights: Callable[[Prompt], Mapping[str, float]],
    rewards: Mapping[str, RewardPart],
) -> None:
    """Adds to a step's request which rewards are asked for gradients, and what they get with each group.

    `weights`: rewards to their weights at this step, by the prompt's source; `rewards`: all of the job.
    """
    groups = sorted({item.sample.id.group for item in request.samples})
    named: set[str] = set()
    for group in groups:
        prompt = prompts[group]
        counted = {name: weight for name, weight in weights(prompt).items() if weight}
        request.prompts.add(group=group, text=prompt.text, metadata=prompt.metadata, weights=counted)
        named |= counted.keys()
    for name in sorted(named):
        part = rewards[name]
        request.gradient_rewards.add(name=name, service=part.service_of(name), params=part.params)
