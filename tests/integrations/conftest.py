from collections.abc import Iterator

import pytest

from tilemoe.integrations import transformers as integration


@pytest.fixture
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()
