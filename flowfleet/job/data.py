"""A job's data: one file of prompts, or several sources with weights and rewards of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, model_validator

from flowfleet.job.part import Factor, Part, Share, ShareCurve, factor_at
from flowfleet.part import rule
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.prompt import Kind

if TYPE_CHECKING:
    from flowfleet.job.rewards import RewardPart

SOURCE_NAME = rule(
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$", "give up to 63 letters, digits, '_' and '-', a letter or digit first"
)
"""A part of names of metrics."""
MAX_SOURCES = 64


def _own_column(name: str) -> str:
    if name in (taken := Columns("preferences").known[1:]):
        raise ValueError(f"{name!r} has another meaning, as have {', '.join(taken)}: rename the column")
    return name


class SourcePart(Part):
    """A source of prompts among several."""

    name: str = Field(pattern=SOURCE_NAME)
    """Name of the source in metrics and samples."""
    path: str = Field(min_length=1)
    """Its prompts, a place as in `data.train`."""
    validation: str | None = Field(default=None, min_length=1)
    """Its held-out prompts, which its rewards score. Unset: none."""
    weight: Share = 1.0
    """Share of a step's prompts, relative to the weights of the other sources."""
    curve: ShareCurve = ()
    """[[step, factor], …], steps ascending: factors of the weight, linear in between, constant before and after."""
    rewards: dict[str, Factor] | None = None
    """Rewards of the job that score its samples, each with a factor of the reward's weight. Unset: all of them."""


class DataPart(Part):
    train: str | None = Field(default=None, min_length=1)
    """Prompt file that the controller reads: .txt (one a line), .jsonl, .json, .csv, .parquet, or a folder that
    `datasets` saved (docs/data.md). For the algorithm `dpo` each row also has `chosen` and `rejected`, the paths of two
    media files. Relative paths in it start at the file's folder. Required, unless there are `sources`."""
    validation: str | None = None
    """Held-out prompts. Unset: no validation."""
    prompt_column: Annotated[str, AfterValidator(_own_column)] = Field(default="prompt", min_length=1)
    """Column of the prompts."""
    ignore_columns: tuple[str, ...] = ()
    """Columns that are left out. All others but `images`, `negative_prompt` and `metadata` become metadata."""
    size_column: Annotated[str | None, AfterValidator(_own_column)] = Field(default=None, min_length=1)
    """Column of the samples' widths and heights, as "768x512". A line without has rollout.width and height, which have
    the most pixels. A batch is one group then, whatever rollout.batch_size is. Unset: all samples have one size."""
    sources: tuple[SourcePart, ...] = Field(default=(), max_length=MAX_SOURCES)
    """Several sources, in place of `train` and `validation`: a `[[data.sources]]` each."""

    @model_validator(mode="after")
    def _one_form(self) -> DataPart:
        if not self.sources:
            if self.train is None:
                raise ValueError("name the prompts: give data.train, or a [[data.sources]] for each of several sources")
            return self
        for name in ("train", "validation"):
            if getattr(self, name) is not None:
                raise ValueError(f"data.{name} has no effect next to [[data.sources]]: make it one of those")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two sources have the name {twice!r}: rename one of them")
        for step in sorted({0, *(step for source in self.sources for step, _ in source.curve)}):
            if not any(source.weight * factor_at(source.curve, step) for source in self.sources):
                raise ValueError(f"no source has a weight at step {step}: raise a weight, or change a curve")
        return self

    @property
    def each(self) -> tuple[Source, ...]:
        """Lists the sources; `train` and `validation` are one without a name."""
        columns = Columns("prompts", self.prompt_column, frozenset(self.ignore_columns), size=self.size_column or "")
        if not self.sources:
            return (Source("", "data.train", self.train or "", "data.validation", self.validation, columns),)
        return tuple(
            Source(
                part.name,
                f"data.sources.{number}.path",
                part.path,
                f"data.sources.{number}.validation",
                part.validation,
                replace(columns, origin=part.name),
                part.weight,
                part.curve,
            )
            for number, part in enumerate(self.sources)
        )

    @property
    def is_validated(self) -> bool:
        """True with held-out prompts."""
        return self.validation is not None or any(source.validation is not None for source in self.sources)

    @property
    def held_out(self) -> tuple[Source, ...]:
        """Sources with held-out prompts."""
        return tuple(source for source in self.each if source.validation is not None)

    def scoring(self, source: str, rewards: Mapping[str, RewardPart]) -> Mapping[str, RewardPart]:
        """The rewards of a source by its name, weighted as it has them. `rewards`: those of the job at a step."""
        own = next((one.rewards for one in self.sources if one.name == source), None)
        if own is None:
            return rewards
        scoring = {name: part for name, part in rewards.items() if name in own}
        return {name: part.model_copy(update={"weight": part.weight * own[name]}) for name, part in scoring.items()}


@dataclass(frozen=True)
class Source:
    """A source as the controller reads it."""

    name: str
    """Empty where the job has `data.train`."""
    setting: str
    """Setting of its prompts, for messages."""
    path: str
    validation_setting: str
    validation: str | None
    columns: Columns
    """Columns of prompts; `of_kind` has those of preferences."""
    weight: float = 1.0
    curve: tuple[tuple[int, float], ...] = ()

    def of_kind(self, kind: Kind) -> Columns:
        """Which columns of its prompts hold what."""
        return replace(self.columns, kind=kind)

    def files(self, kind: Kind) -> Iterator[tuple[str, str, Columns]]:
        """Setting, place and columns of its prompts, then of its held-out ones. `kind`: of the former."""
        yield self.setting, self.path, self.of_kind(kind)
        if self.validation is not None:
            yield self.validation_setting, self.validation, self.columns
