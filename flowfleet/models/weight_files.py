"""Which files of a model's folder hold its weights: one rule for the submit check, `plan`, trainers and every engine.

    STEM.safetensors        or the shards that STEM.safetensors.index.json names, each tensor in one of them
    STEM.VARIANT.safetensors  copies in another data type, which pipelines may have next to these and nothing reads

Of a folder that has more, diffusers takes the index, transformers the single file and vLLM everything: it is refused.
So is one whose files are missing or truncated. Free of torch.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_PICKLES = ("*pytorch_model*.bin", "*pytorch_model*.pt", "*.pth", "*.ckpt")
_WITHOUT_WEIGHTS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "ProcessorPil", "Extractor", "Guidance")
"""Ends of the class names of a pipeline's parts that have no weights."""
_AGAIN = "download or copy the model again"


@dataclass(frozen=True)
class Layout:
    """Where a checkpoint's folder holds the weights that are trained."""

    library: str
    """Library that loads the folder, as model hubs name it."""
    in_root: bool
    """In the folder itself, not in one a component."""
    stem: str
    """Name of a file of weights, before its number and suffix."""
    index: str = ""
    """File that says which of several holds a tensor; empty: named after the stem."""
    others: tuple[str, ...] = ()
    """Further files of weights, which hold other components."""

    @property
    def index_file(self) -> str:
        return self.index or f"{self.stem}.safetensors.index.json"

    def folder(self, component: str) -> str:
        """A component's folder inside the checkpoint's; "" for that itself."""
        return "" if self.in_root else component

    def is_weights(self, name: str) -> bool:
        """Returns True if a file of that folder holds trained weights, or is their index."""
        return name == self.index_file or name.startswith((f"{self.stem}-", f"{self.stem}.safetensors"))


PIPELINE: Final = Layout("diffusers", in_root=False, stem="diffusion_pytorch_model")
"""A pipeline of diffusers."""
TRANSFORMERS: Final = Layout("transformers", in_root=True, stem="model")
"""A model of transformers."""
FLAT: Final = Layout("flowfleet", in_root=True, stem="model")
"""A folder of safetensors for all components, which a family reads by itself."""
BAGEL: Final = Layout(
    "flowfleet", in_root=True, stem="ema", index="model.safetensors.index.json", others=("ae.safetensors",)
)
_PARTS: Final = {layout.library: layout for layout in (PIPELINE, TRANSFORMERS)}
"""Layout of a pipeline's part in its own folder, by the library that loads it."""


def check_model(path: Path, layout: Layout) -> None:
    """Raises ValueError, with what to do, for a model's folder that lacks a file or has one that cannot be loaded."""
    if layout.in_root:
        weight_files(path, layout)
        for name in layout.others:
            tensors_of(path / name)
        return
    index = _json(path / "model_index.json")
    for part, entry in index.items():
        if isinstance(entry, list) and all(isinstance(word, str) for word in entry):  # else a setting, or left out
            check_part(path, part, index)


def check_part(path: Path, part: str, index: Mapping[str, Any]) -> None:
    """Raises ValueError as `check_model`, for one part of a pipeline with this `model_index.json`."""
    library, name = index.get(part) or ("", "")
    if not name:
        return
    folder = path / part
    if not folder.is_dir():
        raise ValueError(f"{path} has no folder {part}, which its model_index.json lists: {_AGAIN}")
    if name.endswith("Scheduler"):
        _check_scheduler(folder)
    if library in _PARTS and not name.endswith(_WITHOUT_WEIGHTS):
        weight_files(folder, _PARTS[library], is_part=True)


def weight_files(folder: Path, layout: Layout = PIPELINE, *, is_part: bool = False) -> list[Path]:
    """The safetensors files of a component: one, or those that its index names. `is_part`: of a pipeline.

    Raises:
        ValueError: there are none, or such that loaders would read differently; one is missing, or not as it says.
    """
    is_part = is_part or not layout.in_root
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    stemmed = [name for name in found if layout.is_weights(name)]
    index, single = folder / layout.index_file, f"{layout.stem}.safetensors"
    refuse_pickles([folder])
    if not index.is_file():
        if single not in found:
            raise ValueError(f"{folder} has no weights: {_absent(layout, found, stemmed)}")
        places, names = None, [single]
    else:
        places = _json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{index} cannot be read as an index of weights: it has no weight_map; {_AGAIN}")
        names = sorted(set(places.values()))
        if missing := [name for name in names if name not in found]:
            count = f"{len(missing)} of {len(names)}"
            raise ValueError(f"{folder} lacks {count} files that its index names, the first is {missing[0]}: {_AGAIN}")
    wrong = [name for name in (stemmed if is_part else found) if name not in (*names, *layout.others)]
    if wrong and not _is_own(layout):
        raise ValueError(
            f"{folder} has {wrong[0]} next to {layout.index_file if places else single}, and loaders differ in which "
            "of them they read: move the files that are not meant out of the folder"
        )
    if not is_part and (folder / "adapter_config.json").is_file() and not _is_own(layout):
        raise ValueError(f"{folder} holds an adapter next to the model: move it out, and give it as model.adapter")
    held = {name: tensors_of(folder / name).keys() for name in names}
    if not _is_own(layout):
        _check_places(folder, held, places)
    return [folder / name for name in names]


def refuse_pickles(folders: Iterable[Path]) -> None:
    """Raises ValueError for a folder whose weights are there as pickles alone: a pickle may run any code."""
    for folder in folders:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles and not any(folder.glob("*.safetensors")):
            raise ValueError(
                f"{folder.name} has its weights as a pickle ({pickles[0]}), which is never read here: convert them, as "
                "save_pretrained(…, safe_serialization=True) of a model that you trust does"
            )


def tensors_of(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file, by name. Raises ValueError as `read_header`."""
    return {name: tuple(entry["shape"]) for name, entry in read_header(file).items() if name != "__metadata__"}


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file. Raises ValueError for a file that is not whole or not of that format."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] | None = json.loads(opened.read(length)) if length <= size - 8 else None
        tensors = {name: entry for name, entry in (header or {}).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values() if len(entry["shape"]) >= 0), default=0)
    except FileNotFoundError:
        raise ValueError(f"{file} is not there: {_AGAIN}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error!r}): {_AGAIN}") from None
    if header is None or size != 8 + length + end:
        raise ValueError(f"{file} is not a whole file of safetensors: it has {size} bytes; {_AGAIN}")
    return header


def has_weights(path: Path) -> bool:
    """True unless a model's folder has configurations alone, as `plan` takes it too."""
    return any(file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt") for file in path.glob("**/*"))


def _absent(layout: Layout, found: list[str], stemmed: list[str]) -> str:
    if stemmed:
        return f"its shards, such as {stemmed[0]}, have no {layout.index_file}; {_AGAIN}"
    if variants := [name for name in found if name.startswith(f"{layout.stem}.")]:
        return (
            f"only a variant, {variants[0]}, and nothing reads variants; download the plain files, or name it "
            f"{layout.stem}.safetensors"
        )
    return f"{layout.stem}.safetensors is not there; {_AGAIN}"


def _check_places(folder: Path, held: Mapping[str, Iterable[str]], places: Mapping[str, str] | None) -> None:
    """Refuses a tensor that two files hold, or that is not where the index says."""
    seen: dict[str, str] = {}
    for file, tensors in held.items():
        for name in tensors:
            if name in seen:
                raise ValueError(f"{folder} has {name} in {seen[name]} and in {file}: {_AGAIN}")
            seen[name] = file
    for name, file in (places or {}).items():
        if seen.get(name) != file:
            raise ValueError(f"{folder} has no {name} in {file}, where its index says it is: {_AGAIN}")


def _check_scheduler(folder: Path) -> None:
    if _json(folder / "scheduler_config.json").get("use_beta_sigmas") and find_spec("scipy") is None:
        raise ValueError(
            f"{folder} spaces its sigmas by a beta distribution (use_beta_sigmas), for which diffusers needs scipy: "
            "install it for the controller, the rollouts and the trainer"
        )


def _is_own(layout: Layout) -> bool:
    """True for a layout that Flowfleet alone reads, and so in one way."""
    return layout.library not in _PARTS


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; {_AGAIN}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} cannot be read: it is not an object; {_AGAIN}")
    return content
