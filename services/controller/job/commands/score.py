"""Score: ask the rewards about a complete group."""

from services.controller.job import requests
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.rewards.job_rewards import preference


async def score(job: JobContext, step: int, group: int) -> None:
    """Send a complete group's pictures to every reward of the job. Preferences already name the better sample."""
    samples = await job.samples(step, group, "sampled")
    prompt = job.prompts(step)[group]
    rewards = job.rewards(prompt, step)
    if job.spec.method.data == "preferences":
        verdicts = [preference(sample.id.index) for sample in samples]
    else:
        verdicts = await job.scoring.score(samples, [prompt] * len(samples), rewards, step)
    await job.reports.scored(samples, [prompt] * len(samples), verdicts)
    facts = [requests.scored_or_dropped(job.spec, *pair) for pair in zip(samples, verdicts, strict=True)]
    if any(isinstance(fact, ev.Dropped) for fact in facts) and await job.scoring.rewards.group_rewards(rewards):
        # disables refilling: a replacement would be scored outside its group
        facts = [f.model_copy(update={"refill": False}) if isinstance(f, ev.Dropped) else f for f in facts]
    await job.emit(*facts)
