"""The ONNX models inside the `rapidocr` wheel, in sessions of ours whose threads sleep between runs."""

import logging
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import onnxruntime

Kind = Literal["det", "rec"]


def model_version() -> str:
    """Which models find and read text, e.g. "rapidocr 3.10.0 PP-OCRv6_det_small PP-OCRv6_rec_small"."""
    return f"rapidocr {version('rapidocr')} {model_path('det').stem} {model_path('rec').stem}"


def model_path(kind: Kind) -> Path:
    """The one model that the wheel carries for detection or recognition. FileNotFoundError when it carries none."""
    spec = find_spec("rapidocr")
    folder = Path(spec.origin).parent / "models" if spec and spec.origin else Path("models")
    found = sorted(folder.glob(f"*_{kind}_*.onnx"))
    if not found:
        raise FileNotFoundError(f"rapidocr carries no model models/*_{kind}_*.onnx: install rapidocr>=3.10")
    return found[-1]


def rapidocr_config(kind: Kind, num_threads: int, settings: dict[str, Any]) -> Any:
    """Builds the configuration of RapidOCR's detector or recognizer, around a session of ours on `num_threads` threads.
    Mutes RapidOCR's own log lines, which are not JSON."""
    from omegaconf import DictConfig
    from rapidocr import EngineType

    logging.getLogger("RapidOCR").setLevel(logging.WARNING)
    common = {"engine_type": EngineType.ONNXRUNTIME, "lang_type": "ch", "session": _session(kind, num_threads)}
    return DictConfig(common | settings, flags={"allow_objects": True})


def _session(kind: Kind, num_threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(model_path(kind)), options, providers=["CPUExecutionProvider"])
