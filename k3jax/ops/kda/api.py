"""KDA's public functions: they check, choose an implementation and keep the dtypes' contract.

B batch, T tokens, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Float, Int

from k3jax.compat import vary_like
from k3jax.ops.kda import mosaic, reference
from k3jax.ops.kda.affine import AffineMap
from k3jax.ops.kda.exchange import Exchange, SideBySide
from k3jax.ops.kda.layout import Layout
from k3jax.ops.kda.pairs import TILE
from k3jax.ops.kda.segments import Plan, evaluate
from k3jax.ops.kda.xla import Xla
from pallas_kernels.kda import check as check_kernels

CHUNK_SIZE = 64
IMPLEMENTATIONS = ("recurrent", "chunked", "mosaic_gpu")


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    gate_lower_bound: float | None = None,
    chunk_size: int = CHUNK_SIZE,
    implementation: str | None = None,
    segments: int | None = None,
    save_states: bool = True,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Kimi Delta Attention: (o, final_state), o in v's dtype, the state float32 (float64 if an input is).

    g is the log decay, at most 0 (−inf is allowed; all else is finite); q and k are used as given; scale is K**-0.5 by
    default, and static. segment_ids (constant in a document, non-decreasing): the state starts at zero in each new
    document; `initial_state` belongs to the first.
    gate_lower_bound promises g >= it everywhere and so makes the tiles of "chunked" cheaper (K3: -5); without it any g
    is right. `jax.experimental.checkify` with user checks catches a broken promise.

    implementation: "recurrent" (the definition), "chunked" (the default everywhere; chunks of `chunk_size` tokens, gradient
    by hand), "mosaic_gpu" (Hopper kernels: bfloat16 q, k, v, float32 g and beta, a bound of at least -5, K and V 64 or
    128, chunks of 64; only the inputs and the states that enter segments are kept for backward).
    Of these two: segments, parts of the sequence that are evaluated side by side (None: planned, so that long sequences of
    few heads keep the cores busy: of this device, or of an H100 or H200 for "mosaic_gpu").
    Of "chunked": save_states, whether backward finds the state of each chunk (B·H·K·V·4 bytes a chunk) or computes it again.

    Raises ValueError for shapes that do not fit together, arrays of integers, an unknown implementation or one that does
    not take these inputs, a chunk size that is not a power of two of at least 16, a bound that is not negative, segments < 1.
    K3 report, section 2.1; Kimi Linear, arXiv:2510.26692.
    """
    check(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound, chunk_size, segments)
    scale = static_scale(q, scale)
    arrays = alike(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound)
    if implementation != "recurrent":
        options = {"chunk_size": chunk_size, "segments": segments, "save_states": save_states}
        return evaluate(plan(arrays, implementation, scale, gate_lower_bound, **options), *arrays)
    if (chunk_size, segments, save_states) != (CHUNK_SIZE, None, True):
        raise ValueError(
            f"chunk_size={chunk_size}, segments={segments}, save_states={save_states}: implementation 'recurrent' has none "
            "of these options; leave them out or choose 'chunked'"
        )
    q, k, values, g, beta, state, segment_ids = arrays
    inputs = widened(q, k, values, g, beta, dtype=state.dtype, scale=scale)
    o, final = reference.recurrent(*inputs, initial_state=state, segment_ids=segment_ids)
    return o.astype(v.dtype), final


def plan(
    arrays: tuple[Any, ...],
    implementation: str | None,
    scale: float,
    gate_lower_bound: float | None,
    *,
    chunk_size: int = CHUNK_SIZE,
    segments: int | None = None,
    save_states: bool = True,
    exchange: Exchange | None = None,
) -> Plan:
    """How to evaluate `arrays`, from `alike`; exchange None: the segments of this device make up the sequence.

    Raises ValueError for an implementation that is unknown or takes no segments, and for what it does not take.
    """
    q, k, v, g, beta, state, segment_ids = arrays
    if implementation in (None, "chunked"):
        layout = Layout.of(k.shape, v.shape[-1], chunk_size, segments, device_cores())
        stages = Xla(layout, state.dtype, scale, gate_lower_bound, save_states)
    elif implementation == "mosaic_gpu":
        if (chunk_size, save_states) != (CHUNK_SIZE, True):
            raise ValueError(
                f"chunk_size={chunk_size}, save_states={save_states}: 'mosaic_gpu' has chunks of {CHUNK_SIZE} and never "
                "saves their states; leave both options out or choose 'chunked'"
            )
        check_kernels(q, k, v, g, beta, state, segment_ids, gate_lower_bound)
        segments = mosaic.planned_segments(q.shape, v.shape[-1]) if segments is None else segments
        stages = mosaic.Mosaic(segments, scale, gate_lower_bound)
    elif implementation == "recurrent":
        raise ValueError("implementation='recurrent' takes no segments; choose 'chunked' or 'mosaic_gpu'")
    else:
        raise ValueError(f"implementation={implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    if exchange is None and stages.segments > 1:
        exchange = SideBySide()
    return Plan(stages, exchange)


def device_cores() -> int:
    """Cores of a device. CPU devices do not say it; fake ones share those of the machine."""
    return getattr(jax.devices()[0], "core_count", None) or max(1, (os.cpu_count() or 1) // jax.local_device_count())


def alike(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound) -> tuple[Any, ...]:
    """The arrays that an implementation with its own gradient gets: a first state, in the dtype that states have, and
    all varying over the same mesh axes, so that the sum of cotangents over others is not its business."""
    if gate_lower_bound is not None:
        # Acts under checkify only. Rounding of the gate itself is no broken promise.
        checkify.debug_check(
            jnp.all(g >= gate_lower_bound * (1 + 1e-6)),
            f"kda: gate_lower_bound={gate_lower_bound} was promised, but g reaches {{lowest}}",
            lowest=g.min(),
        )
    if initial_state is None:
        initial_state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]), jnp.float32)
    dtype = state_dtype(q, k, v, g, beta, initial_state)
    arrays = q, k, v, g, beta, initial_state.astype(dtype), segment_ids
    given = [x for x in arrays if x is not None]
    return tuple(None if x is None else vary_like(x, *given) for x in arrays)


def kda_step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token of `kda` for decoding: (o in v's dtype, next state float32, or float64 if an input is).

    Raises ValueError for shapes that do not fit together. K3 report, section 2.1.
    """
    one = lambda x: x[:, None]
    check(one(q), one(k), one(v), one(g), one(beta), state, None, None, CHUNK_SIZE, state_name="state")
    dtype = state_dtype(q, k, v, g, beta, state)
    inputs = widened(q, k, v, g, beta, dtype=dtype, scale=static_scale(q, scale))
    o, state = reference.step(state.astype(dtype), *inputs)
    return o.astype(v.dtype), state


def summarize(
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> AffineMap:
    """The tokens as a map of the state, final = M initial + S: (M [B,H,K,K], S [B,H,K,V]), float32 (float64 if an input is).

    If a document starts after the first token, M is 0 and S is the final state of the last document.
    K3 report, section 5.1.2.
    """
    check(k, k, v, g, beta, None, segment_ids, None, CHUNK_SIZE)
    layout = Layout.of(k.shape, v.shape[-1], CHUNK_SIZE, 1, device_cores())
    stages = Xla(layout, state_dtype(k, v, g, beta), 1.0, None, save_states=False)
    # Outputs are not computed, so any query does.
    (M, S), _ = stages.maps(stages.prepare(k, k, v, g, beta, segment_ids))
    return M[0], S[0]


def check(
    q, k, v, g, beta, state, segment_ids, gate_lower_bound, chunk_size, segments=None, *, state_name="initial_state"
):
    """Raises ValueError, naming what was got and what is needed."""
    for name, array in (("q", q), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}; it must have four dims, [B,T,H,{'KV'[name == 'v']}]")
    B, T, H, K = q.shape
    needed = {"k": (k, q.shape), "v": (v, (B, T, H, v.shape[-1])), "g": (g, q.shape), "beta": (beta, (B, T, H))}
    if state is not None:
        needed[state_name] = (state, (B, H, K, v.shape[-1]))
    if segment_ids is not None:
        needed["segment_ids"] = (segment_ids, (B, T))
    for name, (array, shape) in needed.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; with q [B,T,H,K] = {q.shape} it must be {shape}")
    for name, array in {"q": q, "k": k, "v": v, "g": g, "beta": beta, state_name: state}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}; it must be a floating-point array")
    for name, size in (("B", B), ("T", T), ("H", H), ("K", K), ("V", v.shape[-1])):
        if size == 0:
            raise ValueError(f"q has shape {q.shape} and v {v.shape}: {name} = 0, at least one is needed")
    for name, value in (("chunk_size", chunk_size), ("segments", segments)):
        if value is not None and not isinstance(value, int):
            raise ValueError(f"{name}={value!r} must be an integer")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids are {segment_ids.dtype}; they must be integers")
    if chunk_size < TILE or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size} must be a power of two of at least {TILE}")
    if segments is not None and segments < 1:
        raise ValueError(f"segments={segments} must be at least 1, or None to let them be planned")
    if isinstance(gate_lower_bound, Tracer):
        raise ValueError("gate_lower_bound is traced; it must be a number that is known when the program is made")
    if gate_lower_bound is not None and not gate_lower_bound < 0:
        raise ValueError(f"gate_lower_bound={gate_lower_bound} must be negative, or None for any gate")


def state_dtype(*arrays: jax.Array):
    """float32, or float64 if an array is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def widened(q, k, v, g, beta, *, dtype, scale: float):
    """All in one dtype, q scaled."""
    q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, g, beta))
    return q * scale, k, v, g, beta


def static_scale(q: jax.Array, scale: Any) -> float:
    """K**-0.5 by default; ValueError if it is not known when the program is made."""
    if isinstance(scale, Tracer):
        raise ValueError("scale is traced; it must be a number that is known when the program is made")
    return q.shape[-1] ** -0.5 if scale is None else float(scale)
