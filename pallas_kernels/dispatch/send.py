"""Every token is read once and written once to each rank that wants it, where that rank's products read it.

N local tokens, k experts a token, R ranks, C rows of a rank's buffer, D width, W 32-bit words of a row.

No list of rows is sorted or kept for sending, and no rank waits for another before it writes: the plan says where each row
belongs. A program is one warpgroup. It takes a token into registers and stores it, 128 lanes side by side, into its row on
each of its ranks; stores to peers are not waited for. When a program has written its share it signals every rank, and a
rank's first program ends when it has heard from all programs of all ranks.

Peers are known only as data, and stores from registers take such a peer on every supported JAX. The copy engine would spare
the registers, but jax 0.10 only takes peers that can be computed before the kernel is launched.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.compat import ALIGNED_PEERS
from pallas_kernels.dispatch.addresses import address, share
from pallas_kernels.mosaic import launch

LANES = 128
PROGRAMS = 264
"""Two on each multiprocessor of an H100 or H200: 7 KB rows in flight for four times what links need to be busy."""
INTERPRETED_PROGRAMS = 2
BLOCKS = {"programs": PROGRAMS, "lanes": LANES}


def send_rows(
    x: Shaped[Array, "N D"],
    targets: Int[Array, "N k"],
    *,
    rows: int,
    axis_name: str | None,
    interpret: bool = False,
) -> Shaped[Array, "{rows} D"]:
    """Each x_n in its rows on ranks of the axis, [C, D]; rows that nothing was sent to are unspecified.

    x: any dtype of at most 32 bits, with rows of whole 512 bytes. targets: `first_copies`, int32; no two anywhere are equal.
    axis_name: inside a shard_map that binds it; None: one rank alone, with all rows.
    Before: each rank holds its own tokens. After: each rank holds the tokens that all ranks had for it.
    Bytes sent by a rank: those of its targets' rows. All devices of the mesh must call it, for JAX's runtime lets them
    wait for each other first, and they must reach each other's memory.

    Raises ValueError for other dtypes and shapes, and for ranks in the interpreter, which knows no peers.
    K3 report, MoonEP (zero-copy dispatch).
    """
    ranks = 1 if axis_name is None else lax.axis_size(axis_name)
    check(x, targets, rows, ranks, interpret)
    words_NW = x.view(jnp.int32)
    programs = min(INTERPRETED_PROGRAMS if interpret else PROGRAMS, len(x))
    (received,) = launch(
        lambda *refs: kernel(*refs, axis=axis_name, ranks=ranks, programs=programs, interpret=interpret),
        *(words_NW, targets),
        name="send_rows",
        out=[jax.ShapeDtypeStruct((rows, words_NW.shape[1]), jnp.int32)],
        grid={"program": programs},
        scratch=[],
        interpret=interpret,
    )
    return received.view(x.dtype)


def kernel(words, targets, received, *, axis: str | None, ranks: int, programs: int, interpret: bool):
    program, (N, k), (C, W) = lax.axis_index("program"), targets.shape, received.shape
    side_by_side = plgpu.Layout.WG_STRIDED((W,), vec_size=words_of_a_lane(W))

    def send(turn, _):
        n = program + turn * programs
        row_W = words[n, :] if interpret else plgpu.layout_cast(words[n, :], side_by_side)
        # All are read before the first store, which none could pass.
        for target in [targets[n, j] for j in range(k)]:

            @pl.when(target >= 0)
            def store(target=target):
                rank, row = address(target, C)
                peer: Any = {axis: rank}
                there = received if ranks == 1 else plgpu.remote_ref(received, peer)
                there[row, :] = row_W

    lax.fori_loop(0, share(program, N, programs), send, None)
    if ranks == 1:
        return

    # One for all programs. A signal comes after what its program has stored, and a wait before what follows it.
    written = pl.get_global(plgpu.SemaphoreType.REGULAR)
    lax.fori_loop(0, ranks, lambda rank, _: pl.semaphore_signal(written, device_id={axis: rank}), None)

    @pl.when(program == 0)
    def _():
        pl.semaphore_wait(written, ranks * programs, decrement=False)


def words_of_a_lane(W: int) -> int:
    """How many a lane loads or stores at once: 4 if a row is whole multiples of all lanes' words, else 2 or 1."""
    return next(words for words in (4, 2, 1) if W % (LANES * words) == 0) if ALIGNED_PEERS else 1


def check(x, targets, rows: int, ranks: int, interpret: bool) -> None:
    """Raises ValueError, naming what was got and what is needed."""
    (N, D), k = x.shape, targets.shape[1]
    if x.dtype.itemsize > 4 or targets.dtype != jnp.int32:
        raise ValueError(f"x is {x.dtype}, targets {targets.dtype}; needed are at most 32 bits, and int32: convert")
    if min(N, D, k, rows) < 1 or D * x.dtype.itemsize % (4 * LANES):
        raise ValueError(
            f"x {x.dtype}[{N}, {D}], targets [{N}, {k}], rows={rows}: needed are at least 1 of each and rows of "
            f"whole {4 * LANES} bytes. Use another width or another exchange"
        )
    if interpret and ranks > 1:
        raise ValueError(
            f"interpret=True on an axis of {ranks} ranks: the interpreter knows no peers; use axis_name=None"
        )
