from __future__ import annotations

import pytest

from pagedkv.attention.backend import choose
from pagedkv.errors import BackendUnavailable


@pytest.fixture(params=["reference", "native"])
def attention_name(request: pytest.FixtureRequest) -> str:
    """Each attention backend that this machine has on its CPU; with "native", the native decoder too."""
    name: str = request.param
    try:
        choose(name, "cpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return name
