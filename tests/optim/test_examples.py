"""Every public function is documented with an example, and the examples hold."""

import doctest
import inspect

import pytest

from k3jax import optim

FUNCTIONS = [name for name in optim.__all__ if inspect.isfunction(getattr(optim, name))]


@pytest.mark.quick
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_public_function_runs(name):
    function = getattr(optim, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, module=False, globs=vars(optim).copy())
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
