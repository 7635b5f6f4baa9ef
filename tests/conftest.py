"""Fixtures shared by all tests. Heavy imports stay inside the fixtures, so that torch-free tests start fast."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny `QwenImagePipeline` checkpoint folder (fp32), made once a test session; read only."""
    from tests.tiny_models import make_tiny_qwen_image

    return make_tiny_qwen_image(tmp_path_factory.mktemp("models") / "tiny-qwen-image")
