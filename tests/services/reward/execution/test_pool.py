"""Processes that share batches: order, equality with one process, deaths, shutdown."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.errors import Unavailable
from flowfleet.rewards.requests import EncodedSample
from services.reward import scorers
from services.reward.execution import decoding, evaluator
from services.reward.execution import pool as pool_module
from services.reward.execution.decoding import Opened
from services.reward.execution.evaluator import Evaluator
from services.reward.execution.groups import units
from services.reward.execution.pool import MAX_AHEAD, MIN_PART, ProcessPool, default_processes, parts_of
from services.reward.metrics import RewardMetrics
from services.reward.scorer import AnyScorer, Outcome, Problem, ProcessLimits, Sample, Score, Scorer
from tests.services.reward.conftest import reward_process
from tests.services.reward.pictures import encoded, page, sample, sign_sample
from tests.services.reward.test_service import score

MAX_PART = ProcessLimits().max_part


class Obedient(Scorer[str]):
    """Scores the number that the prompt is. A prompt "kill once PATH" kills the process if PATH does not exist yet,
    "kill" always, "fail" raises, "pid" gives the process, "sleep" takes half a second, "hang" forever."""

    name, version, score_range = "obedient", "1", (0.0, 1.0)

    def parse(self, params: Mapping[str, str]) -> str:
        return ""

    def score(self, samples: Sequence[Sample], params: str) -> list[Outcome]:
        return [Score(self._value(sample.prompt), {"frames": len(sample.frames)}) for sample in samples]

    def _value(self, prompt: str) -> float:
        word, _, path = prompt.partition(" once ")
        if word == "kill" and not (path and Path(path).exists()):
            if path:
                Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if word in ("sleep", "hang"):
            time.sleep(0.5 if word == "sleep" else 10_000.0)
        return {"kill": 0.5, "pid": float(os.getpid()), "sleep": 0.25}.get(word) or float(prompt)


def broken() -> Scorer[Any]:
    raise FileNotFoundError("no model")


@contextmanager
def started(
    make: Callable[[], AnyScorer],
    num_processes: int,
    limits: ProcessLimits = ProcessLimits(),
    whole_groups: bool = False,
    num_threads: int = 1,
) -> Iterator[tuple[ProcessPool, CollectorRegistry]]:
    registry = CollectorRegistry()
    metrics = RewardMetrics("obedient", (0.0, 1.0), registry)
    pool = ProcessPool(make, num_processes, metrics, limits=limits, whole_groups=whole_groups, num_threads=num_threads)
    try:
        yield pool, registry
    finally:
        pool.close()


@pytest.fixture(scope="module")
def obedient() -> Iterator[tuple[ProcessPool, CollectorRegistry]]:
    with started(Obedient, 2) as both:
        yield both


PICTURE = encoded(Image.new("RGB", (8, 8)))


def asked(*prompts: str, groups: str = "") -> list[EncodedSample]:
    """Requests that are groups of one, or all in one group."""
    of = groups or " " * len(prompts)
    pairs = enumerate(zip(prompts, of, strict=True))
    return [EncodedSample(PICTURE, "image/png", prompt, {}, group, str(index)) for index, (prompt, group) in pairs]


def pids_of(pool: ProcessPool) -> list[int]:
    return [worker._process.pid for worker in pool._workers if worker._process and worker._process.pid]


def deaths(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("flowfleet_reward_process_deaths_total", {"scorer": "obedient"}) or 0.0


def test_outcomes_keep_their_order_and_their_own_problems(obedient: tuple[ProcessPool, CollectorRegistry]) -> None:
    pool, registry = obedient
    prompts = [str(number / 64) for number in range(40)]
    prompts[21], prompts[30] = "fail", "nan"
    samples = asked(*prompts)
    samples[7] = dataclasses.replace(samples[7], media=b"junk")
    outcomes = pool(samples, "")
    reasons = {index: outcome.reason for index, outcome in enumerate(outcomes) if isinstance(outcome, Problem)}
    assert reasons == {7: "undecodable", 21: "scorer_failed", 30: "non_finite"}
    for index in set(range(40)) - set(reasons):
        assert outcomes[index] == Score(index / 64, {"frames": 1})
    assert registry.get_sample_value("flowfleet_reward_processes", {"scorer": "obedient"}) == 2


def test_all_processes_get_some_of_a_batch(obedient: tuple[ProcessPool, CollectorRegistry]) -> None:
    pool, registry = obedient
    busy = partial(registry.get_sample_value, "flowfleet_reward_busy_seconds_total", {"scorer": "obedient"})
    before, start = busy() or 0.0, time.perf_counter()
    assert [outcome.value for outcome in pool(asked(*["sleep"] * 4), "") if isinstance(outcome, Score)] == [0.25] * 4
    took_s, busy_s = time.perf_counter() - start, (busy() or 0.0) - before
    assert busy_s >= 2.0
    assert took_s < busy_s  # one process alone is never busy for longer than it takes
    pids = {outcome.value for outcome in pool(asked(*["sleep", "pid"] * 2), "") if isinstance(outcome, Score)} - {0.25}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_process_that_dies_is_replaced_and_its_samples_are_asked_again(
    obedient: tuple[ProcessPool, CollectorRegistry], tmp_path: Path
) -> None:
    pool, registry = obedient
    before = deaths(registry)
    outcomes = pool(asked("0.5", "0.25", f"kill once {tmp_path / 'a'}", "0.75"), "")
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [0.5, 0.25, 0.5, 0.75]
    assert deaths(registry) == before + 1
    assert len(pool(asked(*["0.5"] * 20), "")) == 20


def test_only_the_sample_that_kills_again_is_a_problem(obedient: tuple[ProcessPool, CollectorRegistry]) -> None:
    pool, registry = obedient
    before = deaths(registry)
    outcomes = pool(asked("0.5", "0.25", "0.125", "kill", "0.75", "1"), "")
    values = [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes]
    assert values == [0.5, 0.25, 0.125, None, 0.75, 1.0]
    assert outcomes[3] == Problem(
        "scorer_died", "the process that scored this sample died twice, the second time with signal SIGKILL"
    )
    assert deaths(registry) == before + 2


ONE_BY_ONE = ProcessLimits(max_part=1)


class Unsteady(Obedient):
    """Cannot be made for the third time."""

    def __init__(self, path: Path) -> None:
        starts = int(path.read_text() or 0) + 1
        path.write_text(str(starts))
        if starts == 3:
            raise OSError("no memory left")


def test_scores_stay_with_their_samples_where_a_process_does_not_come_up_again(tmp_path: Path) -> None:
    counter = tmp_path / "starts"
    counter.touch()
    numbers = [str(number / 64) for number in range(1, 7)]
    scores = [Score(float(number), {"frames": 1}) for number in numbers]
    with started(partial(Unsteady, counter), 1, ONE_BY_ONE) as (pool, _):
        outcomes = pool(asked("kill", *numbers), "")
        assert isinstance(outcomes[0], Problem)
        assert outcomes[1:] == scores
        assert pool(asked(*numbers), "") == scores


@pytest.mark.parametrize("num_threads", [1, MAX_AHEAD])
def test_what_a_process_had_ready_is_not_lost_with_it(num_threads: int) -> None:
    numbers = [str(number / 64) for number in range(6)]
    with started(Obedient, 1, ONE_BY_ONE, num_threads=num_threads) as (pool, _):
        outcomes = pool(asked(*numbers[:2], "kill", *numbers[2:]), "")
    assert [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes] == [
        *map(float, numbers[:2]),
        None,
        *map(float, numbers[2:]),
    ]


class Patient(Obedient):
    """Scores "0.5", and decodes "0.25", when "0.75" has been decoded. Decoding "kill" kills the process."""

    def start(self) -> None:
        self._is_decoded = threading.Event()
        evaluator.decode = self._decode  # type: ignore[attr-defined]

    def _decode(self, opened: Opened) -> Sample | Problem:
        prompt = opened.sample.prompt
        if prompt == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "0.75":
            self._is_decoded.set()
        assert prompt != "0.25" or self._is_decoded.wait(30.0)
        return decoding.decode(opened)

    def _value(self, prompt: str) -> float:
        assert prompt != "0.5" or self._is_decoded.wait(30.0)
        return float(prompt)


@pytest.mark.parametrize("num_threads", [1, MAX_AHEAD])
def test_the_next_parts_are_decoded_at_once_while_one_is_scored(num_threads: int) -> None:
    prompts = ["0.5", *["0.25"] * (num_threads - 1), "0.75", "1", "1"]
    with started(Patient, 1, ONE_BY_ONE, num_threads=num_threads) as (pool, _):
        outcomes = pool(asked(*prompts), "")
    assert outcomes == [Score(float(prompt), {"frames": 1}) for prompt in prompts]


@pytest.mark.parametrize("num_threads", [1, MAX_AHEAD])
def test_a_process_that_dies_of_decoding_ahead_costs_its_own_sample(num_threads: int) -> None:
    prompts = ["1", "0.125", "1", "0.125", "kill", "1", "0.125"]
    with started(Patient, 1, ONE_BY_ONE, num_threads=num_threads) as (pool, registry):
        outcomes = pool(asked(*prompts), "")
        assert 2 <= deaths(registry) <= 3
    assert isinstance(outcomes.pop(4), Problem)
    assert outcomes == [Score(float(prompt), {"frames": 1}) for prompt in prompts if prompt != "kill"]


class Quitting(Obedient):
    """Ends its process as a function can that calls sys.exit."""

    def _value(self, prompt: str) -> float:
        return sys.exit(3) if prompt == "quit" else float(prompt)


def test_a_process_that_ends_itself_is_replaced() -> None:
    with started(Quitting, 1, ONE_BY_ONE) as (pool, registry):
        outcomes = pool(asked("0.5", "quit", "0.75"), "")
        assert outcomes[1] == Problem(
            "scorer_died", "the process that scored this sample died twice, the second time with exit code 3"
        )
        assert (outcomes[0], outcomes[2]) == (Score(0.5, {"frames": 1}), Score(0.75, {"frames": 1}))
        assert deaths(registry) == 2


SHORT = ProcessLimits(base_s=2.0, sample_s=0.5)


def test_a_process_that_hangs_is_replaced_and_only_its_sample_is_a_problem() -> None:
    with started(Obedient, 1, dataclasses.replace(SHORT, setting="settings.patience_s")) as (pool, registry):
        outcomes = pool(asked("0.5", "hang", "0.75"), "")
        assert [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes] == [0.5, None, 0.75]
        assert outcomes[1] == Problem(
            "scorer_died",
            "the process that scored this sample died twice, the second time with signal SIGKILL after 2.5 s without "
            "an answer: raise settings.patience_s if that is too little",
        )
        assert deaths(registry) == 2
        assert pool(asked("1"), "") == [Score(1.0, {"frames": 1})]


def test_a_process_that_takes_no_request_is_replaced() -> None:
    with started(Obedient, 1, SHORT) as (pool, registry):
        psutil.Process(pids_of(pool)[0]).suspend()
        outcome = pool([EncodedSample(bytes(2**22), "image/png", "")], "")[0]
        assert isinstance(outcome, Problem)
        assert outcome.reason == "undecodable"
        assert deaths(registry) == 1


def test_closing_ends_a_process_that_hangs() -> None:
    with started(Obedient, 2, SHORT) as (pool, _):
        pids = pids_of(pool)
        late = threading.Thread(target=pool, args=(asked("hang"), ""), daemon=True)
        late.start()
        time.sleep(0.1)
        start = time.perf_counter()
    assert time.perf_counter() - start < 30.0
    late.join(1.0)
    assert not late.is_alive()
    assert not any(map(psutil.pid_exists, pids))
    assert not any(worker._process for worker in pool._workers)


def test_a_scorer_that_cannot_be_made_is_said_at_once() -> None:
    with pytest.raises(Unavailable, match="did not start \\(exit code 1\\)"), started(broken, 2):
        pass


def test_closing_ends_the_processes() -> None:
    with started(Obedient, 2) as (pool, _):
        pids = pids_of(pool)
        assert len(pids) == 2
        late = threading.Thread(target=pool, args=(asked("sleep"), ""))
        late.start()
        time.sleep(0.1)
    late.join()
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("num_samples", "num_processes", "sizes"),
    [(1, 4, [1]), (3, 4, [2, 1]), (16, 2, [8, 8]), (16, 16, [2] * 8), (20, 3, [7, 7, 6]), (64, 2, [8] * 8)],
)
def test_batches_are_cut_for_all_processes(num_samples: int, num_processes: int, sizes: list[int]) -> None:
    samples = asked(*map(str, range(num_samples)))
    parts = list(parts_of(units(samples, whole_groups=False), num_processes, MAX_PART))
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for (item,) in part] == samples
    assert all(size <= MAX_PART for size in sizes)
    assert all(size >= MIN_PART for size in sizes[:-1])


@pytest.mark.parametrize(
    ("groups", "num_processes", "sizes"),
    [([4, 4, 4], 3, [4, 4, 4]), ([20], 4, [20]), ([3, 3, 3, 3], 1, [6, 6]), ([1, 9, 1, 1], 2, [1, 9, 2])],
)
def test_groups_are_never_cut(groups: list[int], num_processes: int, sizes: list[int]) -> None:
    samples = [
        EncodedSample(b"", "image/png", "", group_id=str(group))
        for group, size in enumerate(groups)
        for _ in range(size)
    ]
    parts = list(parts_of(units(samples, whole_groups=True), num_processes, MAX_PART))
    assert [sum(map(len, part)) for part in parts] == sizes
    assert [len(unit) for part in parts for unit in part] == groups


class OfGroups(Obedient):
    """Scores how many samples of its group came along; 0 for one whose group came in parts."""

    needs_group = True

    def score(self, samples: Sequence[Sample], params: str) -> list[Outcome]:
        for one in samples:
            self._value(one.prompt)
        return [Score(sum(other.group_id == one.group_id for other in samples)) for one in samples]


def test_groups_reach_the_processes_whole_and_are_asked_again_whole(tmp_path: Path) -> None:
    samples = asked("1", "1", "1", f"kill once {tmp_path / 'a'}", "1", "1", "1", groups="aabbbcc")
    with started(OfGroups, 2, whole_groups=True) as (pool, registry):
        outcomes = pool(samples, "")
        assert deaths(registry) == 1
    assert [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes] == [2, 2, 3, 3, 3, 2, 2]


@pytest.mark.parametrize(("cpus", "number"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (64, 16)])
def test_heavy_scorers_get_half_of_the_cpus(cpus: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "usable_cpus", lambda: cpus)
    assert default_processes(heavy=True) == number
    assert default_processes(heavy=False) == 1


def test_ocr_in_processes_gives_the_same_bits() -> None:
    scorer: Any = scorers.make("ocr", {}, 1)
    signs = [sign_sample(str(number), word) for number, word in enumerate(("AB3", "XY7", "K7QX", "CD4", "EF5"))]
    pages = [sample(str(points), page(("Exit 42", 0.2, 0.3, points)), '"Exit 42"') for points in (20, 40, 60)]
    here = Evaluator(scorer, 1)
    with started(partial(scorers.make, "ocr", {}, 1), 2) as (pool, _):
        for samples, settings in ((signs, {}), (signs, {"score": "soft"}), (pages, {"region": "page"})):
            params = scorer.parse(settings)
            given = [EncodedSample.of(sample) for sample in samples]
            outcomes = pool(given, params)
            assert outcomes == here(given, params)
            assert all(isinstance(outcome, Score) for outcome in outcomes)
    here.close()


async def test_processes_end_with_a_service_that_is_killed(tmp_path: Path) -> None:
    with reward_process(tmp_path, "--scorer", "jpeg_compressibility", "--processes", "2") as service:
        assert service.metric("flowfleet_reward_processes") == 2
        parent = psutil.Process(service.process.pid)
        children = parent.children(recursive=True)
        assert len(children) >= 2
        assert (await score(service, [sign_sample(str(number), "AB3") for number in range(5)]))["4"].score < 0.0
        service.process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive


def test_a_drained_service_leaves_no_process(tmp_path: Path) -> None:
    with reward_process(tmp_path, "--scorer", "jpeg_compressibility", "--processes", "2") as service:
        children = psutil.Process(service.process.pid).children(recursive=True)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
        assert '"msg": "stopped"' in service.log.read_text().splitlines()[-1]
