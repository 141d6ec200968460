"""One set of weights and one served model for all tests here: programs are compiled once."""

import pytest
import serving_problem


@pytest.fixture(scope="session")
def weights():
    return serving_problem.weights()


@pytest.fixture(scope="session")
def model(weights):
    return serving_problem.serving(weights)
