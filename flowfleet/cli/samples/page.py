"""A page of samples to judge rewards by looking: one HTML file with everything in it, without scripts.

Text reaches the page through `tag` alone, which escapes it, and the page's own Content-Security-Policy lets it load
nothing and run nothing, so a prompt may contain any text. Two views of the same cards: by rank, and by group with
the other members.
"""

import base64
import html
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowfleet.api.jobs import Job
from flowfleet.api.samples import Sample
from flowfleet.cli.rewards.disagreement import rewards_of
from flowfleet.client.progress import number

_STYLE: Final = Path(__file__).with_name("page.css")
_POLICY: Final = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
_MEDIA_TYPES: Final = frozenset({"image/png", "image/jpeg", "image/webp", "video/mp4"})
TEXT: Final = "text/plain"
MAX_CHARACTERS: Final = 20_000
"""Characters that are shown of an answer."""
_VOID: Final = frozenset({"meta", "img", "input", "wbr"})
_SMALL: Final = 160
"""Maximum pixels of a picture that is enlarged with sharp pixels."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Shown:
    """A sample on the page."""

    sample: Sample
    media: bytes | None
    """Contents of the file; None once it is no longer kept."""
    rank: int | None = None
    """Rank among the requested samples, from 1; None for other members of their groups."""
    note: str = ""
    """Why it is here, where its reward does not say it."""


class _Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: str, **attributes: object) -> _Markup:
    """An element. Children and attributes are escaped, except children that `tag` made; an attribute that is None or
    False is left out, and True is one without a value. `class_` and `_` inside of names are as HTML has them."""
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    opened = f"<{' '.join(words)}>"
    return _Markup(opened if name in _VOID else f"{opened}{join(children)}</{name}>")


def join(children: Iterable[str]) -> _Markup:
    """Joins the children, escaped except those that `tag` made."""
    return _Markup("".join(child if isinstance(child, _Markup) else html.escape(child) for child in children))


def page(job: Job, heading: str, shown: Sequence[Shown], remark: str = "") -> str:
    """The whole file. `shown` in any order: groups come in the order of their best ranks."""
    groups = _by_group(shown)
    scales = _scales([item.sample for item in shown])
    picked = sum(item.rank is not None for item in shown)
    scorers = _common_versions(shown)
    facts = f"{job.name} · job {job.id} · samples: {picked} of {len(shown)} shown · groups: {len(groups)}"
    if scorers:
        facts += f" · scored by {scorers}"
    views = _choice("view", "View", ("ranked", "By rank", True), ("grouped", "By group", False))
    return _document(
        f"{heading} · {job.name}", heading, facts, remark, [views], [_group(m, scales, scorers) for m in groups]
    )


def side_by_side(title: str, facts: str, remark: str, prompts: Sequence[Sequence[Shown]]) -> str:
    """The whole file of a page with a row of cards for each prompt, in the order given; a card's note names its
    model."""
    scales = _scales([item.sample for shown in prompts for item in shown])
    scorers = _common_versions([item for shown in prompts for item in shown])
    if scorers:
        facts += f" · scored by {scorers}"
    return _document(title, title, facts, remark, [], [_group(shown, scales, scorers) for shown in prompts])


def _document(
    title: str, heading: str, facts: str, remark: str, views: Sequence[_Markup], groups: Sequence[_Markup]
) -> str:
    header = tag("header", tag("h1", heading), tag("p", facts, class_="soft"), *([tag("p", remark)] if remark else []))
    sizes = _choice("size", "Size", ("small", "S", False), ("medium", "M", True), ("large", "L", False))
    controls, main = tag("div", *views, sizes, class_="controls"), tag("main", *groups)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", _Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", header, controls, main), lang="en")


def _choice(name: str, legend: str, *options: tuple[str, str, bool]) -> _Markup:
    made = [
        tag("label", tag("input", type="radio", name=name, id=key, checked=chosen), text)
        for key, text, chosen in options
    ]
    return tag("fieldset", tag("legend", legend), *made)


def _by_group(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Members from the highest reward to those without one; groups by their best rank."""
    groups: dict[tuple[int, int], list[Shown]] = {}
    for item in sorted(shown, key=lambda item: len(shown) if item.rank is None else item.rank):
        groups.setdefault((item.sample.step, item.sample.group), []).append(item)

    def descending(item: Shown) -> tuple[bool, float, int]:
        return item.sample.reward is None, -(item.sample.reward or 0.0), item.sample.index

    return [sorted(members, key=descending) for members in groups.values()]


def _common_versions(shown: Sequence[Shown]) -> str:
    """Scorers of all samples; empty where samples differ, which then name their own."""
    versions = {_versions(item.sample) for item in shown if item.sample.versions}
    return versions.pop() if len(versions) == 1 else ""


def _versions(sample: Sample) -> str:
    return " · ".join(
        version if version.startswith(name) else f"{name}: {version}"
        for name, version in sorted(sample.versions.items())
    )


def _group(members: Sequence[Shown], scales: Mapping[str, tuple[float, float]], scorers: str) -> _Markup:
    first = members[0].sample
    rewards = [item.sample.reward for item in members if item.sample.reward is not None]
    words = [_step(first), f"group {first.group}", *filter(None, [first.source]), f"{len(members)} shown"]
    if rewards:
        words.append(f"reward {number(statistics.fmean(rewards))} ± {number(statistics.pstdev(rewards))}")
    header = tag("header", tag("h2", first.prompt), tag("p", " · ".join(words), class_="soft"), _strip(members, scales))
    cards = tag("div", *(_card(item, scales, scorers) for item in members), class_="cards")
    return tag("section", header, cards, class_="group")


def _strip(members: Sequence[Shown], scales: Mapping[str, tuple[float, float]]) -> _Markup:
    """Where the members' rewards lie between the least and the greatest on the page."""
    ticks = [
        tag("line", x1=at, x2=at, y1=1, y2=17, class_="picked" if item.rank is not None else None)
        for item in members
        if item.sample.reward is not None
        for at in [round(200 * _fraction(item.sample.reward, scales[""]), 1)]
    ]
    base = tag("line", x1=0, x2=200, y1=9, y2=9, class_="base")
    what = {"role": "img", "aria_label": "rewards of the group"}
    return tag("svg", base, *ticks, class_="strip", viewBox="0 0 200 18", preserveAspectRatio="none", **what)


def _card(item: Shown, scales: Mapping[str, tuple[float, float]], scorers: str) -> _Markup:
    """`scorers` are named once on the page already."""
    sample = item.sample
    rank = (
        [] if item.rank is None else [tag("span", f"#{item.rank}", class_="rank", title="place in what was asked for")]
    )
    reward = tag("span", number(sample.reward) if sample.reward is not None else "no reward", class_="reward")
    body = [tag("p", sample.prompt, class_="prompt"), tag("div", reward, *rank, class_="head")]
    if item.note:
        body.append(tag("p", item.note, class_="why"))
    if sample.drop_reason:
        body.append(tag("p", f"not trained on: {sample.drop_reason}", class_="drop"))
    if sample.gated_by:
        body.append(tag("p", f"gated by {sample.gated_by}", class_="drop"))
    body.append(_scores(sample, scales))
    facts = [f"group {sample.group} · sample {sample.index} · policy {sample.policy_version} · seed {sample.seed}"]
    facts += [versions for versions in [_versions(sample)] if versions and versions != scorers]
    lines = (tag("div", fact) for fact in facts)
    body.append(tag("details", tag("summary", _step(sample)), *lines, class_="facts"))
    style = None if item.rank is None else f"--rank: {item.rank}"
    return tag(
        "article",
        _media(item),
        tag("div", *body, class_="body"),
        class_="picked" if item.rank is not None else None,
        style=style,
    )


def _step(sample: Sample) -> str:
    return f"step {sample.step}" if sample.purpose == "train" else f"validation of version {sample.step}"


def _media(item: Shown) -> _Markup:
    media_type = item.sample.media_type
    if item.media is None:
        return tag("div", "no longer kept", class_="gone")
    if media_type == TEXT:
        return tag("pre", item.media.decode("utf-8", "replace")[:MAX_CHARACTERS], class_="answer")
    if media_type not in _MEDIA_TYPES:
        return tag("div", f"{media_type} is not shown", class_="gone")
    source = f"data:{media_type};base64,{base64.b64encode(item.media).decode()}"
    if media_type.startswith("video/"):
        plays = dict.fromkeys(("autoplay", "controls", "loop", "muted", "playsinline"), True)
        return tag("video", src=source, aria_label=item.sample.prompt, **plays, preload="auto")
    return tag(
        "img", src=source, alt=item.sample.prompt, class_=_sharpness(item.media), loading="lazy", decoding="async"
    )


def _sharpness(media: bytes) -> str | None:
    """Class of a small PNG, which smoothing would blur."""
    width = int.from_bytes(media[16:20], "big") if media.startswith(_PNG) else 0
    return "pixels" if 0 < width <= _SMALL else None


def _scores(sample: Sample, scales: Mapping[str, tuple[float, float]]) -> _Markup:
    """Rewards, each with its components below it, then shadows."""
    rewards = rewards_of(sample)
    rows = [
        _row(name.partition(f"{reward}.")[2] or name, value, scales[name], None if name == reward else "part")
        for reward in sorted(rewards)
        for name, value in sorted(sample.scores.items())
        if name == reward or name.startswith(f"{reward}.")
    ]
    rows += [
        _row(f"{name} (shadow)", value, scales[f"shadow {name}"], "shadow")
        for name, value in sorted(sample.shadow.items())
    ]
    return tag("table", *rows)


def _row(name: str, value: float | None, scale: tuple[float, float], kind: str | None) -> _Markup:
    bar = []
    if value is not None:
        zero, end = (100 * _fraction(at, scale) for at in (0.0, value))
        bar = [tag("i", style=f"left: {min(zero, end):.1f}%; width: {abs(end - zero):.1f}%")]
    cells = tag("td", tag("div", *bar, class_="bar")), tag("td", "none" if value is None else number(value))
    return tag("tr", tag("th", *_breakable(name), scope="row"), *cells, class_=kind)


def _breakable(name: str) -> list[str]:
    """A name that breaks after its marks and not inside of words."""
    return [part for piece in re.findall(r"[^_.-]*[_.-]?", name) if piece for part in (piece, tag("wbr"))][:-1]


def _scales(samples: Iterable[Sample]) -> dict[str, tuple[float, float]]:
    """Ends of the bars of each score, and of "", the reward: 0 to 1 where all are inside of that, else the least and
    the greatest with 0 among them."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        shadows = {f"shadow {name}": value for name, value in sample.shadow.items()}
        for name, value in {"": sample.reward, **sample.scores, **shadows}.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    ends = {name: (min(numbers, default=0.0), max(numbers, default=1.0)) for name, numbers in values.items()}
    return {
        name: (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (min(low, 0.0), max(high, 0.0))
        for name, (low, high) in ends.items()
    }


def _fraction(value: float, scale: tuple[float, float]) -> float:
    low, high = scale
    return min(1.0, max(0.0, (value - low) / (high - low)))


def picks(samples: Iterable[Sample], num: int, *, best: bool) -> list[Sample]:
    """Picks at most `num` of the samples that have a reward, of each prompt and of the newest step first, and ranks
    them by reward."""

    def by_reward(sample: Sample) -> float:
        return sample.reward or 0.0

    steps: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            steps[sample.step].append(sample)
    rounds: dict[int, list[Sample]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for step in sorted(steps, reverse=True):
        for sample in sorted(steps[step], key=by_reward, reverse=best):
            rounds[seen[sample.prompt]].append(sample)
            seen[sample.prompt] += 1
    picked = [sample for turn in sorted(rounds) for sample in rounds[turn]][:num]
    return sorted(picked, key=by_reward, reverse=best)
