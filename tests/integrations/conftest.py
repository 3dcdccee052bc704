from collections.abc import Iterator

import pytest

from tilemoe.integrations import transformers as integration


@pytest.fixture
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


@pytest.fixture
def unregistered_after() -> Iterator[None]:
    """For a test that registers by itself."""
    yield
    integration.unregister()
