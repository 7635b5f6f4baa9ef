"""Training engines that are not installed here."""

from pathlib import Path

import pytest

from services.trainer.model.backends import backend_of
from services.trainer.model.backends.fsdp import Fsdp
from tests.services.trainer.sequences import make_spec


def test_an_engine_that_is_not_installed_is_named_with_the_remedy(tmp_path: Path) -> None:
    assert isinstance(backend_of(make_spec(tmp_path)), Fsdp)
    with pytest.raises(ValueError, match=r'trainer\.backend = "veomni": No module named .*--trainer-python'):
        backend_of(make_spec(tmp_path, trainer={"backend": "veomni"}))
