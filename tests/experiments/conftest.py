"""What all runs here share: a model, some text, and compiled programs."""

import dataclasses
import json
import random

import jax
import pytest
from runs import MODEL, config_for, options_for, train

from k3jax.train.run import Run


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Runs in this process share what they compile; processes that are started have a directory for that."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    with pytest.MonkeyPatch.context() as patch:
        share_compiled(patch)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("compiled")))
        yield
    jax.config.update("jax_enable_compilation_cache", enabled)


def share_compiled(patch):
    """Runs with equal steps on equal meshes share what is compiled: tracing it again takes longer than running it."""
    names, seen, compile_anew = ("_step", "_evaluate", "_held_out"), {}, Run.compile

    def compile_once(job):
        key = (job.config.step, job.spec, job.config.eval_every)
        if key not in seen:
            compile_anew(job)
            seen[key] = {name: value for name, value in vars(job).items() if name in names}
        vars(job).update(seen[key])
        return 0.0, 0.0

    patch.setattr(Run, "compile", compile_once)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A directory with a model and some text."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "tiny.json").write_text(json.dumps(dataclasses.asdict(MODEL)))
    words = "the expert routes a token through its latent and then the state decays while keys write".split()
    draw = random.Random(0)
    (directory / "text.txt").write_text(" ".join(draw.choice(words) for _ in range(4000)))
    return directory


@pytest.fixture
def options(cache, files):
    """Options of a run of six steps, but for its workdir."""
    return options_for(files)


@pytest.fixture(scope="session")
def unbroken(cache, files, tmp_path_factory):
    """A finished run."""
    return train(config_for(files, tmp_path_factory.mktemp("runs") / "unbroken"))
