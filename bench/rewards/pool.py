"""Does the process pool of a reward service earn its lines? The pool against plain services that share its calls.

    python -m bench.rewards.pool [--only jpeg ocr python] [--processes 2] [--groups 4] [--rounds 5]

Three ways score the same pictures on the same CPUs. Calls are cut as a controller cuts them.

pool    one service with `--processes N`
plain   N services with `--processes 1 --threads 1`; each call goes to a service with a free place
one     one service with `--processes 1 --threads N`

A plain service decodes and scores in its own process, `python` too. A service has two places for calls per scoring
process. All ways are up during the rounds and take turns, each round in another order; rates are medians over rounds.
PSS is summed over a way's processes after a pass of all pictures, while the other ways are down.

In the case `python` one picture then crashes its process, twice. A plain service that ends is started again, as
Kubernetes would; the caller sends each sample of its lost calls alone, once, as the pool does inside. Columns of that
crash: healthy samples that the caller sent again, runs of the function on healthy samples beyond one each, healthy
samples lost with the second crash, and seconds beyond the way's median. `taskset -c 0,1 python …` restricts the CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from PIL import Image

from bench.rewards.reward import GROUP, Case, groups, pictures
from bench.rewards.service import RestartedService
from flowfleet.process.service import usable_cpus
from flowfleet.rewards.requests import EncodedSample, ScoreCall
from services.controller.rewards.chunking import chunks

WAYS, PLACES = ("pool", "plain", "one"), 2
LOOPS = 60_000  # about 5 ms of pure Python on a current core
CASES = {
    "jpeg": (Case("jpeg_compressibility"), ({},)),
    "ocr": (Case("ocr"), ({"region": "line"}, {"region": "page"})),
    "python": (Case("python", settings={"function": "bench.rewards.pool:busy", "path": "."}), ({},)),
}


def busy(picture: Image.Image, prompt: str, metadata: Mapping[str, str]) -> float:
    """Function of the case `python`: notes its run in the file `log` and crashes on `poison`, if metadata has them."""
    if "log" in metadata:
        with open(metadata["log"], "a") as log:
            log.write(metadata["number"] + "\n")
    if "poison" in metadata:
        os._exit(9)
    return sum(number & 7 for number in range(LOOPS)) / LOOPS


@dataclass
class Crash:
    """What one poisoned picture cost."""

    sent_again: int = 0
    run_again: int = 0
    unscored: int = 0
    seconds: float = 0.0


@dataclass
class Result:
    """Figures of one way in one case."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round, by region; "" for scorers without regions."""
    pss: int = 0
    crash: Crash | None = None


class Way:
    """The services of one way. Each gets a call when it has a place free."""

    def __init__(self, name: str, case: Case, number: int, folder: Path) -> None:
        flags = [*case.flags, "--processes", str(number if name == "pool" else 1)]
        flags += ["--threads", str(number if name == "one" else 1)]
        module = "services.reward" if name == "pool" else "bench.rewards.plain_service"
        self.services = [RestartedService(folder, module, flags) for _ in range(number if name == "plain" else 1)]
        self._num_places = PLACES * (number if name == "pool" else 1)
        self._places: asyncio.Queue[RestartedService]

    async def start(self) -> None:
        await asyncio.gather(*(service.start() for service in self.services))
        self._call_bytes = await self.services[0].call_bytes()
        self._places = asyncio.Queue()
        for _ in range(self._num_places):
            for service in self.services:
                self._places.put_nowait(service)

    async def stop(self) -> None:
        await asyncio.gather(*(service.stop() for service in self.services))

    async def timed(self, samples: Sequence[EncodedSample], params: Mapping[str, str]) -> float:
        """Seconds to score all samples, each of which must get a score."""
        start = time.perf_counter()
        scored, sent_again = await self.scored(samples, params)
        assert (len(scored), len(sent_again)) == (len(samples), 0), "a service has failed"
        return time.perf_counter() - start

    async def scored(
        self, samples: Sequence[EncodedSample], params: Mapping[str, str]
    ) -> tuple[Counter[str], Counter[str]]:
        """Ids of the samples that got a score, and of those that were sent again, each with its count."""
        scored: Counter[str] = Counter()
        sent_again: Counter[str] = Counter()

        async def ask(part: Sequence[EncodedSample], again: bool) -> None:
            service = await self._places.get()
            given = await service.score(ScoreCall(part, params))
            self._places.put_nowait(service)
            if given is not None:
                scored.update(sample.sample_id for sample, good in zip(part, given, strict=True) if good)
            elif not again:
                sent_again.update(sample.sample_id for sample in part)
                await asyncio.gather(*(ask([sample], again=True) for sample in part))

        calls = [call for group in groups(samples) for call in chunks(group, GROUP, wished_bytes=self._call_bytes)]
        await asyncio.gather(*(ask(call, again=False) for call in calls))
        return scored, sent_again

    async def crash(self, samples: Sequence[EncodedSample], usual_s: float, log: Path) -> Crash:
        """Scores the samples with a poisoned one in their middle."""
        marked = [replace(one, metadata={"log": str(log), "number": one.sample_id}) for one in samples]
        bad = marked[len(marked) // 2]
        marked[len(marked) // 2] = replace(bad, metadata={**bad.metadata, "poison": "yes"})
        start = time.perf_counter()
        scored, sent_again = await self.scored(marked, {})
        seconds = time.perf_counter() - start - usual_s
        assert bad.sample_id not in scored, "the poisoned sample was scored"
        healthy = {sample.sample_id for sample in samples} - {bad.sample_id}
        runs = Counter((await asyncio.to_thread(log.read_text)).split())
        run_again = sum(runs[one] - 1 for one in healthy if runs[one])
        return Crash(sum(sent_again[one] for one in healthy), run_again, len(healthy - scored.keys()), seconds)


async def measure(name: str, number: int, samples: Sequence[EncodedSample], rounds: int) -> dict[str, Result]:
    """All ways of one case."""
    case, all_params = CASES[name]
    results = {way: Result({params.get("region", ""): [] for params in all_params}) for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        ways = {way: Way(way, case, number, Path(folder)) for way in WAYS}
        for key, way in ways.items():
            await way.start()
            for params in all_params:
                await way.timed(samples, params)
            results[key].pss = sum(service.pss() for service in way.services)
            await way.stop()
        await asyncio.gather(*(way.start() for way in ways.values()))
        for turn in range(-1, rounds):  # the first warms up
            for params in all_params:
                for key in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                    seconds = await ways[key].timed(samples, params)
                    if turn >= 0:
                        results[key].seconds[params.get("region", "")].append(seconds)
        if name == "python":
            for key, way in ways.items():
                usual_s = statistics.median(results[key].seconds[""])
                results[key].crash = await way.crash(samples, usual_s, Path(folder) / f"{key}.log")
        await asyncio.gather(*(way.stop() for way in ways.values()))
    return results


def show(name: str, results: Mapping[str, Result], num_samples: int) -> None:
    for region in results["one"].seconds:
        rates = {way: num_samples / statistics.median(result.seconds[region]) for way, result in results.items()}
        for way, result in results.items():
            cells = result.crash and (*astuple(result.crash)[:3], f"{result.crash.seconds:.1f}")
            text = "".join(f"{cell:>12}" for cell in cells or ("–",) * 4)
            label, ratio = f"{name} {region}".strip(), rates[way] / rates["one"]
            print(f"{label:<10}{way:<7}{rates[way]:>10.1f}{ratio:>7.2f}{result.pss / 2**20:>9.0f}{text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--processes", type=int, default=usable_cpus(), help="N (the usable CPUs)")
    parser.add_argument("--groups", type=int, default=4, help="of 16 pictures (4)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    samples = pictures(GROUP * options.groups)
    heads = ("sent again", "run again", "unscored", "more s")
    print(
        f"{'case':<10}{'way':<7}{'pictures/s':>10}{'× one':>7}{'PSS MiB':>9}" + "".join(f"{one:>12}" for one in heads)
    )
    for name in options.only:
        show(name, asyncio.run(measure(name, options.processes, samples, options.rounds)), len(samples))


if __name__ == "__main__":
    main()
