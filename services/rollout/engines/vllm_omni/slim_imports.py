"""Slim imports: vLLM-Omni loads where torchvision, librosa and other libraries of its language models are absent.

`vllm_omni.config.pipeline_registry` needs only `<package>.pipeline` of every model package, but importing those runs
the packages' `__init__`, which import whole models. Here the packages are registered without running theirs.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

LANGUAGE_MODELS = "vllm_omni.model_executor.models"
WAN = "vllm_omni.diffusion.models.wan2_2"
"""Package whose `__init__` imports Wan's pipelines for images and sound, which need torchvision too."""


def install() -> None:
    """Registers the model packages as bare ones; only where torchvision is absent. To be called before the import of
    anything that reads the registry; calling it again changes nothing."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None, "vLLM-Omni asked for this, so it is there"
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for folder in sorted((root / "model_executor" / "models").iterdir()):
        if (folder / "pipeline.py").is_file() and (folder / "__init__.py").is_file():
            _register(f"{LANGUAGE_MODELS}.{folder.name}", folder)
    _register(WAN, root / "diffusion" / "models" / "wan2_2")


def _register(name: str, folder: Path) -> None:
    if name not in sys.modules:
        sys.modules[name] = _bare(name, folder)


def _bare(name: str, folder: Path) -> ModuleType:
    module = ModuleType(name)
    origin = folder / "__init__.py"
    module.__path__, module.__package__, module.__file__ = [str(folder)], name, str(origin)
    module.__spec__ = importlib.util.spec_from_file_location(name, origin, submodule_search_locations=[str(folder)])
    return module
