"""The kernel inspector says what a kernel costs, and what it cannot say here."""

import pytest

from pallas_kernels import aot, inspect
from pallas_kernels.catalog import Shape, expert_kernels, kda_kernels, kernels


def test_every_kernel_is_listed_with_blocks_bytes_and_roofline(monkeypatch, capsys):
    monkeypatch.setattr(aot, "what_is_missing", lambda: "no compiler here")
    assert inspect.main(["--tokens=64", "--heads=1"]) == 0
    printed = capsys.readouterr().out
    assert "not compiled: no compiler here" in printed and "H200" in printed
    for kernel in kernels(Shape(tokens=64, heads=1)):
        blocks = " ".join(f"{name}={size}" for name, size in kernel.blocks.items())
        assert f"{kernel.name}   {blocks}\n  {kernel.bytes / 1e6:.1f} MB" in printed


def test_bytes_are_those_of_inputs_and_outputs():
    prepare, *_ = kernels(Shape(tokens=64, heads=1))
    inputs = 64 * (3 * 128 * 2 + 128 * 4 + 4 + 4)
    outputs = 64 * (4 * 128 * 2 + 64 * 2) + 128 * 4
    assert prepare.bytes == inputs + outputs


def test_bytes_leave_out_what_a_kernel_is_given_and_does_not_read():
    bytes_of = {kernel.name: kernel.bytes for kernel in kernels(Shape(tokens=64, heads=1))}
    square, keys, state = 64 * 64 * 2, 64 * 128 * 2, 128 * 128 * 2
    vector, beta = 128 * 4, 64 * 4
    # -K_start, X_end, Q, dO, E and A_X with the decay; the final state's cotangent. Cotangents of states, writes, beta.
    assert bytes_of["kda_reverse"] == 5 * keys + square + vector + 2 * state + state + keys + 2 * state + beta
    # dO, E, Y; two states; beta, documents, decay. dv, three of keys, two squares, the decay's.
    assert bytes_of["kda_chunk_gradients"] == 3 * keys + 2 * state + 2 * beta + vector + 4 * keys + 2 * square + vector


def test_work_grows_with_whole_chunks_of_tokens():
    work = lambda tokens: [kernel.operations for kernel in kda_kernels(Shape(tokens=tokens))]
    *chunk, token = work(64)  # decode takes one token however many there are
    assert work(65) == [*(2 * x for x in chunk), token]
    assert token == 2 * 96 * 128 * 128 * 3 * 8


def test_experts_read_their_rows_and_all_their_weights():
    shape = Shape(tokens=8, experts=3, experts_per_token=2, latent=128, expert_hidden=256)
    (gated,) = (kernel for kernel in expert_kernels(shape) if kernel.name == "grouped_gated_product")
    assert gated.bytes == 2 * (16 * 128 + 2 * 3 * 128 * 256 + 16 * 256) + 3 * 4
    assert gated.operations == 2 * 16 * 128 * (2 * 256)


@pytest.mark.parametrize("argument", ["--tokens=0", "--key-dim=60", "--latent=100", "--heads=many"])
def test_a_bad_shape_exits_with_2(argument, capsys):
    with pytest.raises(SystemExit) as error:
        inspect.main([argument])
    said = capsys.readouterr().err
    assert error.value.code == 2 and argument.split("=")[0] in said and said.count("\n") == 1


def test_a_spilling_kernel_fails_the_inspection(monkeypatch, capsys):
    monkeypatch.setattr(aot, "what_is_missing", lambda: None)
    monkeypatch.setattr(aot, "restart_ready_to_compile", lambda: None)
    monkeypatch.setattr(aot, "compile_kernel", lambda *_: aot.Machine(255, 8, 100, 1, 1))
    assert inspect.main(["--tokens=64"]) == 1
    assert "8 bytes spilled" in capsys.readouterr().out
