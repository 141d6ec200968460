import jaxtyping
import pytest


@pytest.fixture(scope="module")
def without_type_checks():
    """For what makes a million small calls: their checks would take ten times as long as they do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
