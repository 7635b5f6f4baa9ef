"""Consequences of a reward that is unreachable, slow, or answers rubbish: real gRPC servers, the test's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from flowfleet.job.spec import RewardPart
from flowfleet.proto import reward_pb2
from services.controller.rewards import outages
from services.controller.rewards.answers import Answer, is_rubbish, read_answers
from services.controller.rewards.failures import RewardFailure, RewardPause, of_call
from services.controller.rewards.outages import PROBE_EVERY_S, Attempt, Outage
from tests.services.controller.reward_fleet import PATIENCE_S, Service, samples, with_services
from tests.waiting import until

SERVICE = "flowfleet.v1.RewardService"


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.0)


async def test_a_reward_is_waited_for_to_its_deadline_and_the_others_are_not_asked_again() -> None:
    good, bad = Service(), Service()
    bad.code = grpc.StatusCode.INTERNAL
    rewards = {"bad": RewardPart(), "good": RewardPart()}
    async with with_services({"good": good, "bad": bad}) as fleet:
        for _ in range(3):
            with pytest.raises(RewardFailure, match=r"rewards\.bad: service 'bad' at 127\.0\.0\.1:\d+ failed with INT"):
                await fleet.score(rewards, 0, samples("a", "b"))
            fleet.now += 30.0
        bad.code = None
        verdicts = await fleet.score(rewards, 0, samples("a", "b"))
        assert {verdict.score for verdict in verdicts.values()} == {2.0}
        assert (good.sizes, bad.sizes) == ([2], [2] * 4)
        assert fleet.counted("failures", reward="bad") == 3


async def test_then_the_job_pauses_and_asks_again_when_it_is_resumed() -> None:
    bad = Service()
    bad.code = grpc.StatusCode.INTERNAL
    rewards = {"bad": RewardPart()}
    async with with_services({"bad": bad}) as fleet:
        for _ in range(2):  # once more after it was resumed too early
            with pytest.raises(RewardFailure):
                await fleet.score(rewards, 0, samples("a"))
            fleet.now += PATIENCE_S
            with pytest.raises(RewardPause, match=r"timeouts.rewards_s = 100 s.*on_failure.*resumes by itself"):
                await fleet.score(rewards, 0, samples("a"))
        bad.code = None
        assert (await fleet.score(rewards, 0, samples("a")))["a"].score == 1.0
        assert fleet.counted("given_up_samples", reward="bad", policy="pause") == 2


@pytest.mark.parametrize("policy", ["drop", "skip"])
async def test_or_the_samples_are_dropped_or_go_on_without_and_nobody_waits_again_for_long(policy: Any) -> None:
    good, bad = Service(), Service()
    bad.code = grpc.StatusCode.INTERNAL
    rewards = {"bad": RewardPart(on_failure=policy), "good": RewardPart(weight=0.5)}
    async with with_services({"good": good, "bad": bad}) as fleet:

        async def verdict_of(name: str) -> Any:
            return (await fleet.score(rewards, 0, samples(name)))[name]

        with pytest.raises(RewardFailure):
            await verdict_of("a")
        fleet.now += PATIENCE_S
        for name in ("a", "b"):  # b was never sent: what fails for so long is not waited for again
            verdict = await verdict_of(name)
            dropped = (None, "no_score_bad", ())
            assert (verdict.score, verdict.reason, verdict.skipped) == (
                dropped if policy == "drop" else (0.5, "", ("bad",))
            )
            assert verdict.rewards == {"good": 1.0}, "no zero"
        assert len(bad.sizes) == 2
        bad.code = None
        fleet.now += PROBE_EVERY_S
        assert (await verdict_of("c")).score == 1.5
        assert fleet.counted("given_up_samples", reward="bad", policy=policy) == 2


async def test_what_somebody_must_change_first_pauses_at_once() -> None:
    bad = Service()
    bad.code, bad.details = grpc.StatusCode.INVALID_ARGUMENT, "params: unknown mode 'strictt'"
    async with with_services({"bad": bad}) as fleet:
        with pytest.raises(RewardPause, match="refuses the request: params: unknown mode 'strictt'"):
            await fleet.score({"bad": RewardPart()}, 0, samples("a"))


async def test_a_refused_token_is_waited_for_since_secrets_reach_pods_one_after_the_other() -> None:
    bad = Service()
    bad.code, bad.details = grpc.StatusCode.UNAUTHENTICATED, "no token"
    async with with_services({"bad": bad}) as fleet:
        rewards = {"bad": RewardPart()}
        with pytest.raises(RewardFailure, match="refuses the controller") as failed:
            await fleet.score(rewards, 0, samples("a"))
        assert failed.value.permanent, "a new job, or a change of the rewards, is refused"
        bad.code = None
        assert (await fleet.score(rewards, 0, samples("a")))["a"].score == 1.0
        bad.code = grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(RewardFailure):
            await fleet.score(rewards, 0, samples("b"))
        fleet.now += PATIENCE_S
        with pytest.raises(RewardPause, match=r"FLOWFLEET_RPC_TOKEN must be .*It failed for timeouts\.rewards_s"):
            await fleet.score(rewards, 0, samples("b"))


def rubbish(kind: str) -> Callable[[Any], list[reward_pb2.RewardScore]]:
    def answer(asked: Any) -> list[reward_pb2.RewardScore]:
        scores = [reward_pb2.RewardScore(sample_id=one.sample_id, score=0.5) for one in asked]
        match kind:
            case "missing":
                return []
            case "duplicated":
                return scores * 2
            case "empty":
                return [reward_pb2.RewardScore(sample_id=one.sample_id) for one in asked]
            case "not_finite":
                return [reward_pb2.RewardScore(sample_id=one.sample_id, score=float("nan")) for one in asked]
        return [reward_pb2.RewardScore(sample_id=one.sample_id, score=9.0) for one in asked]

    return answer


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "missing in the response"),
        ("duplicated", "in the response 2 times"),
        ("empty", "neither score nor error"),
        ("not_finite", "the score is nan"),
        ("out_of_range", "outside 0 … 1, which Describe promises"),
    ],
)
def test_rubbish_for_all_samples_is_the_fault_of_the_service(kind: str, says: str) -> None:
    described = reward_pb2.DescribeResponse(score_min=0.0, score_max=1.0)
    asked = samples("a", "b")
    response = reward_pb2.ScoreResponse(scores=rubbish(kind)(asked))
    found = read_answers(asked, response, described, 0.1)
    assert {(answer.fault, answer.score) for answer in found.values()} == {(kind, None)}
    assert says in found["a"].problem
    assert is_rubbish(list(found.values()))
    assert not is_rubbish([found["a"]]), "a lone sample may be the reason itself"
    said = reward_pb2.RewardScore(sample_id="a", error="no text")
    good = read_answers(asked, reward_pb2.ScoreResponse(scores=[said]), described, 0.1)
    assert not is_rubbish(list(good.values())), "the service spoke of a sample"


def test_exchanged_scores_are_seen_while_a_job_runs() -> None:
    """Each sample has an id and a score: only the size that a service reports with the score tells whose it is."""
    described = reward_pb2.DescribeResponse(score_min=0.0, score_max=1.0)
    asked = [replace(one, media=bytes(size)) for one, size in zip(samples("a", "b", "c"), (10, 20, 30), strict=True)]

    def found(*sizes: int) -> dict[str, Answer]:
        scores = [
            reward_pb2.RewardScore(sample_id=one.sample_id, score=0.5, media_size=size)
            for one, size in zip(asked, sizes, strict=True)
        ]
        return read_answers(asked, reward_pb2.ScoreResponse(scores=scores), described, 0.1)

    assert {answer.fault for answer in found(10, 20, 30).values()} == {""}
    assert {answer.fault for answer in found(0, 0, 0).values()} == {""}, "services of before tell nothing"
    shifted = found(10, 30, 20)
    assert is_rubbish(list(shifted.values())), "the first sample's score cannot be believed either"
    assert "'b' has 20 bytes of media, its score is of 30" in shifted["a"].problem


async def test_rubbish_is_asked_for_again() -> None:
    service = Service()
    good, service.answers = service.answers, rubbish("not_finite")
    async with with_services({"x": service}) as fleet:
        with pytest.raises(RewardFailure, match=r"rewards\.x: service 'x' gave no usable answer.* the score is nan"):
            await fleet.score({"x": RewardPart()}, 0, samples("a", "b"))
        service.answers = good
        assert (await fleet.score({"x": RewardPart()}, 0, samples("a", "b")))["b"].score == 1.0


def test_an_infinite_range_or_none_refuses_nothing() -> None:
    for low, high in [(0.0, 0.0), (float("-inf"), 0.0), (0.0, float("inf"))]:
        described = reward_pb2.DescribeResponse(score_min=low, score_max=high)
        value = -5.0 if high == 0.0 else 5.0
        scores = [reward_pb2.RewardScore(sample_id="a", score=value)]
        assert read_answers(samples("a"), reward_pb2.ScoreResponse(scores=scores), described, 0.0)["a"].score == value


async def test_one_service_may_give_several_rewards_and_tells_its_version() -> None:
    service = Service()
    service.version = "2"
    rewards = {
        "plain": RewardPart(service="ocr", params={"mode": "a"}),
        "strict": RewardPart(service="ocr", weight=2.0, params={"mode": "b"}),
    }
    async with with_services({"ocr": service}) as fleet:
        verdict = (await fleet.score(rewards, 0, samples("a")))["a"]
        assert (verdict.score, verdict.rewards) == (3.0, {"plain": 1.0, "strict": 1.0})
        assert verdict.versions == {"plain": "scripted 2", "strict": "scripted 2"}
        assert {params["mode"] for params in service.params} == {"a", "b"}
        service.version = ""
        answers = await fleet.job_rewards.ask("plain", rewards["plain"], samples("b"))
        assert answers["b"].version == "scripted 1", "of Describe"


async def test_calls_shrink_to_what_a_service_receives() -> None:
    """4 MiB is what gRPC receives unless told otherwise."""
    service = Service()
    service.max_bytes = 5000
    async with with_services({"x": service}) as fleet:
        assert len(await fleet.job_rewards.ask("x", RewardPart(), samples(*"abcdefgh", size=1000))) == 8
        assert sorted(service.sizes) == [4, 4, 8]
        assert len(await fleet.job_rewards.ask("x", RewardPart(), samples(*"abcdefgh", size=1000))) == 8
        assert max(service.sizes[3:]) == 4
        with pytest.raises(RewardFailure, match="raise its limit for received messages"):
            await fleet.job_rewards.ask("x", RewardPart(), samples("a", size=6000))


class Garbage(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return b"score: a lot"

        return grpc.unary_unary_rpc_method_handler(answer)


class Nothing(grpc.GenericRpcHandler):
    """Has no method."""

    def service(self, details: Any) -> Any:
        return None


async def test_other_servers_are_told_from_reward_services() -> None:
    part = RewardPart()
    film = Service(modalities=[reward_pb2.MODALITY_VIDEO])
    services = {"garbage": Garbage(), "nothing": Nothing(), "newer": Service(contract=9), "film": film}
    async with with_services(services, {"missing": "127.0.0.1:9"}) as fleet:
        for name, says, permanent in [
            ("garbage", "not with messages of flowfleet.v1.RewardService", False),
            ("nothing", "is no flowfleet.v1.RewardService", True),
            ("missing", r"at 127\.0\.0\.1:9 cannot be reached .*controller's --reward", False),
            ("newer", "speaks contract 9 of RewardService, but this controller knows 2: upgrade", True),
            ("film", "does not score pictures: leave it out", True),
            ("unknown", "reward service 'unknown' is gone; there are: film, garbage, missing, newer, nothing", False),
        ]:
            with pytest.raises(RewardFailure, match=says) as failed:
                await fleet.job_rewards.ask(name, part, samples("a"))
            assert str(failed.value).startswith(f"rewards.{name}")
            assert failed.value.permanent == permanent, name


@pytest.mark.parametrize(
    ("code", "details", "says", "permanent"),
    [
        ("UNAVAILABLE", "h:1 speaks no TLS: set FLOWFLEET_TLS_DIR", "reached: h:1 speaks no TLS: set FLOWFLEET", False),
        ("UNAVAILABLE", "connection refused", "start it, or correct its address", False),
        (
            "DEADLINE_EXCEEDED",
            "Deadline Exceeded",
            "no answer in 20 s: make it faster, or raise timeouts.score_s",
            False,
        ),
        ("UNAUTHENTICATED", "no token", "FLOWFLEET_RPC_TOKEN", True),
        ("RESOURCE_EXHAUSTED", "busy", "add replicas", False),
    ],
)
def test_a_failed_call_names_the_service_and_what_to_change(
    code: str, details: str, says: str, permanent: bool
) -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    failure = of_call("ocr", "ocr-v2", "h:1", error, 20.0)
    assert str(failure).startswith("rewards.ocr: service 'ocr-v2' at h:1 ")
    assert says in str(failure)
    assert failure.permanent == permanent


def test_an_outage_begins_with_the_samples_that_were_sent_first() -> None:
    outage = Outage()
    assert outage.failed(50.0, "gone") == 50.0
    assert outage.failed(40.0, "gone") == 40.0, "sent before, failed later"
    assert outage.failed(60.0, "gone") == 40.0
    outage.worked(65.0)
    assert outage.failed(70.0, "gone") == 70.0
    assert outage.failed(40.0, "gone") == 65.0, "others were scored after it was sent"


def test_one_probe_at_a_time_and_the_next_some_time_after_its_end() -> None:
    outage = Outage(since=0.0)
    with outage.asking(lambda: 80.0):
        assert outage.may_ask(80.0), "all are asked while it does not count as failed"
    outage.give_up(90.0)
    assert not outage.may_ask(90.0)
    assert outage.may_ask(90.0 + PROBE_EVERY_S)
    with outage.asking(lambda: 400.0):
        assert not outage.may_ask(399.0), "the probe hangs"
    assert [outage.may_ask(400.0 + after) for after in (0.0, PROBE_EVERY_S)] == [False, True]
    with outage.asking(lambda: 500.0):
        outage.worked(500.0)
    assert outage.may_ask(500.0)


def test_an_attempt_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.2)
    delays = [Attempt(0.0, failures={"ocr": count}).delay("ocr") for count in (0, 1, 2, 3, 30)]
    assert delays == [0.0, 0.2, 0.4, 0.8, 5.0]


@pytest.mark.parametrize("policy", ["pause", "drop", "skip"])
async def test_what_failed_before_a_pause_does_not_count_after_it(policy: Any) -> None:
    bad = Service()
    bad.code = grpc.StatusCode.INTERNAL
    rewards = {"bad": RewardPart(on_failure=policy)}
    async with with_services({"bad": bad}) as fleet:
        with pytest.raises(RewardFailure):
            await fleet.score(rewards, 0, samples("a"))
        bad.gate = gate = asyncio.Event()
        straggler = asyncio.create_task(fleet.score(rewards, 0, samples("b")))
        await until(lambda: len(bad.sizes) >= 2)
        fleet.job_rewards.reset()
        fleet.now += PATIENCE_S
        gate.set()
        with pytest.raises(RewardFailure):  # it neither pauses the job nor drops its samples
            await straggler
        fleet.now += 10 * PATIENCE_S
        for name in ("a", "b", "c"):
            with pytest.raises(RewardFailure):
                await fleet.score(rewards, 0, samples(name))


async def test_samples_whose_calls_take_long_are_not_forgotten_meanwhile() -> None:
    """`timeouts.score_s` may be longer than `timeouts.rewards_s`."""
    bad, good = Service(), Service()
    bad.code = grpc.StatusCode.INTERNAL
    async with with_services({"bad": bad, "good": good}) as fleet:
        bad.gate = gate = asyncio.Event()
        slow = asyncio.create_task(fleet.score({"bad": RewardPart()}, 0, samples("a")))
        await until(lambda: bad.sizes)
        fleet.now += 3 * PATIENCE_S
        await fleet.score({"good": RewardPart()}, 0, samples("b"))
        gate.set()
        with pytest.raises(RewardPause):
            await slow


@pytest.mark.parametrize("policy", ["pause", "drop", "skip"])
async def test_samples_that_always_fail_cost_no_others(policy: Any) -> None:
    bad, good = Service(), Service()
    bad.poison = "a"
    rewards = {"bad": RewardPart(on_failure=policy), "good": RewardPart(weight=0.5)}
    async with with_services({"bad": bad, "good": good}) as fleet:

        async def verdict_of(name: str) -> Any:
            return (await fleet.score(rewards, 0, samples(name)))[name]

        for name in "bcde":
            with pytest.raises(RewardFailure):
                await verdict_of("a")
            assert (await verdict_of(name)).score == 1.5
            fleet.now += PATIENCE_S / 4
        if policy == "pause":
            with pytest.raises(RewardPause, match="= 100 s on the same samples, while others were scored"):
                await verdict_of("a")
            return
        assert (await verdict_of("a")).score == (None if policy == "drop" else 0.5)
        for name in "fg":
            assert (await verdict_of(name)).score == 1.5, "it is asked and not given up"
        bad.code = grpc.StatusCode.INTERNAL
        with pytest.raises(RewardFailure):  # and is waited for as before
            await verdict_of("h")


async def test_a_probe_that_hangs_keeps_nobody_else_waiting() -> None:
    bad = Service()
    bad.code = grpc.StatusCode.INTERNAL
    rewards = {"bad": RewardPart(on_failure="drop")}
    async with with_services({"bad": bad}) as fleet:
        with pytest.raises(RewardFailure):
            await fleet.score(rewards, 0, samples("a"))
        fleet.now += PATIENCE_S
        await fleet.score(rewards, 0, samples("a"))
        bad.gate = asyncio.Event()
        fleet.now += PROBE_EVERY_S
        probe = asyncio.create_task(fleet.score(rewards, 0, samples("b")))
        await until(lambda: len(bad.sizes) >= 3)
        fleet.now += 2 * PROBE_EVERY_S
        dropped = asyncio.gather(*(fleet.score(rewards, 0, samples(name)) for name in "cdef"))
        await asyncio.wait_for(dropped, 5)
        assert len(bad.sizes) == 3
        bad.gate.set()
        await probe
        await fleet.score(rewards, 0, samples("g"))
        assert len(bad.sizes) == 3, "the time counts from its end"


async def test_media_are_fetched_when_somebody_is_asked() -> None:
    bad, good = Service(), Service()
    bad.code = grpc.StatusCode.INTERNAL
    rewards = {"bad": RewardPart(on_failure="skip"), "good": RewardPart()}
    async with with_services({"bad": bad, "good": good}) as fleet:
        with pytest.raises(RewardFailure):
            await fleet.score(rewards, 0, samples("a"))
        assert fleet.fetched == 1, "once for both"
        fleet.now += PATIENCE_S
        await fleet.score(rewards, 0, samples("a"))
        assert fleet.fetched == 2
        await fleet.score({"bad": rewards["bad"]}, 0, samples("b"))
        assert fleet.fetched == 2, "the only reward is given up"
        await fleet.score(rewards, 0, samples("b"))
        assert (fleet.fetched, len(bad.sizes), len(good.sizes)) == (3, 2, 2)
