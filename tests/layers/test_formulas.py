"""Every layer computes the published formula: transcriptions in numpy float64 that share no code with the layers.

B batch, T tokens, D model, H heads, K key dim, V value dim, L latent, W conv width. Each transcription takes one
sequence, token by token where that is the definition. K3 report sections 2.1 to 2.4; Kimi Linear, arXiv:2510.26692.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from k3jax import model as lm
from k3jax.layers.common import Tokens
from k3jax.ops.kda import kda
from k3jax.ops.short_conv import short_conv
from k3jax.train.config import StepConfig
from k3jax.train.step import learning_rate_schedule

# Large epsilons of different sizes, and bounds that activations reach: a wrong one shows at once.
CONFIG = dataclasses.replace(
    tiny.MODEL, norm_eps=0.03, latent_norm_eps=0.2, situ_beta=1.5, situ_linear_beta=2.5, routed_scaling=1.7
)
KIMI_LINEAR = dataclasses.replace(
    CONFIG, gate_lower_bound=None, output_gate_rank=5, q_lora_rank=None, mla_output_gate=False, activation="swiglu"
)
B, T = 2, 130  # two chunks of the KDA kernel and two tokens more
STARTS = [[0, 40, 100], [0, 1, 90]]  # of documents
SPLITS = [1, 2, 15, 16, 17, 63, 64, 65, 129]  # around tiles and chunks; none at the start of the first row's documents
QUICK_SPLITS = [2, 64, 129]


def draw(config, part, seed=0):
    """Parameters far from initial values: unit signals through matrices, every vector away from zeros and ones."""
    random = np.random.default_rng(seed)

    def leaf(path, a):
        name = path[-1].key
        if name == "weight" and len(a.shape) == 1:  # of a norm
            return random.uniform(0.4, 2.0, a.shape)
        if name.endswith("_conv"):
            scale = np.ones(a.shape[1])
            if name != "v_conv":
                scale[0] = 2e-3  # the first head's q and k are as small as the epsilon of their norm
            return random.normal(size=a.shape) * scale[:, None]
        if len(a.shape) == 1 or name == "gate_bias":
            return 0.5 * random.normal(size=a.shape)
        return 1.5 * random.normal(size=a.shape) * a.shape[-2] ** -0.5

    values = jax.tree_util.tree_map_with_path(leaf, lm.shapes(config, part))
    return jax.tree.map(lambda a: a.astype(np.float32), values)


def inputs(seed=1):
    x = np.random.default_rng(seed).normal(size=(B, T, CONFIG.hidden_size)).astype(np.float32)
    segments = np.stack([(np.arange(T)[:, None] >= starts).sum(1) for starts in STARTS]).astype(np.int32)
    return x, segments


def in_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def assert_same(got, expected, tolerance=5e-6):
    """float32 against float64: 2**-24 a rounding, grown by sums of up to 130 tokens and a few matrices in a row."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@functools.partial(jax.jit, static_argnames=("config", "kind", "absorbed"))  # eager operations would take far longer
def attend(config, kind, params, x, segments, absorbed=False):
    return report(config, kind, params, x, segments, segments, absorbed)[0]


@functools.partial(jax.jit, static_argnames=("config", "kind", "absorbed"))
def report(config, kind, params, x, segments, ids, absorbed=False):
    form = {"absorbed": True} if absorbed else {}
    return lm.bind(config, kind, params).attn(x, Tokens(segments, ids), **form)


# ---- formulas ------------------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def l2_norm(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def conv(w, x, segments):
    """y_t = w[-1] x_t + w[-2] x_{t-1} + ... inside the document of t."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(len(w), t + 1)):
            if segments[t - back] == segments[t]:
                y[t] += w[len(w) - 1 - back] * x[t - back]
    return y


def projected(p, x, name):
    return np.einsum("td,hdk->thk", x, p[f"{name}_proj"])


def log_decay(config, p, x):
    H, K = p["gate_bias"].shape
    z = (x @ p["gate_down"] @ p["gate_up"]).reshape(-1, H, K) + p["gate_bias"]
    rate = np.exp(p["a_log"])[:, None]
    if config.gate_lower_bound is None:
        return -rate * np.log1p(np.exp(z))
    return config.gate_lower_bound * sigmoid(rate * z)


def delta_rule(q, k, v, g, beta, segments):
    """Decay, read the error, write, then output; the outputs and the last state."""
    n, H, K = q.shape
    o, state = np.zeros(v.shape), np.zeros((H, K, v.shape[-1]))
    for t in range(n):
        for h in range(H):
            S = np.zeros_like(state[h]) if t == 0 or segments[t] != segments[t - 1] else state[h]
            S = np.exp(g[t, h])[:, None] * S
            error = v[t, h] - S.T @ k[t, h]
            S = S + beta[t, h] * np.outer(k[t, h], error)
            o[t, h] = K**-0.5 * S.T @ q[t, h]
            state[h] = S
    return o, state


def kda_output(config, p, x, o):
    gate = x @ p["out_gate"] if "out_gate" in p else x @ p["out_gate_down"] @ p["out_gate_up"]
    normed = rms_norm(o, p["out_norm"]["weight"], config.norm_eps)
    return (sigmoid(gate) * normed.reshape(len(x), -1)) @ p["out_proj"]


def kda_layer(config, p, x, segments):
    def channel(name):
        y = conv(p[f"{name}_conv"], projected(p, x, name), segments)
        return y * sigmoid(y)

    q, k, v = l2_norm(channel("q")), l2_norm(channel("k")), channel("v")
    o, state = delta_rule(q, k, v, log_decay(config, p, x), sigmoid(x @ p["beta_proj"]), segments)
    return kda_output(config, p, x, o), state


def mla_layer(config, p, x, segments):
    """Output, and the logits of all heads [H, T, T], −inf where a query does not see a key."""
    eps, L, n = config.latent_norm_eps, config.kv_lora_rank, len(x)
    if "q_proj" in p:
        q = projected(p, x, "q")
    else:
        q = np.einsum("tr,hrk->thk", rms_norm(x @ p["q_down"], p["q_norm"]["weight"], eps), p["q_up"])
    kv = x @ p["kv_down"]
    latent, shared = rms_norm(kv[:, :L], p["kv_norm"]["weight"], eps), kv[:, L:]
    visible = np.tril(np.ones((n, n), bool)) & (segments[:, None] == segments[None])
    heads, seen = [], []
    for h in range(config.num_heads):
        k = np.concatenate([latent @ p["k_up"][h], shared], -1)
        logits = q[:, h] @ k.T * (config.qk_nope_dim + config.qk_rope_dim) ** -0.5
        seen.append(np.where(visible, logits, -np.inf))
        weights = np.exp(seen[-1] - seen[-1].max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ (latent @ p["v_up"][h]))
    o = np.concatenate(heads, -1)
    if "out_gate" in p:
        o = sigmoid(x @ p["out_gate"]) * o
    return o @ p["out_proj"], np.stack(seen)


def ffn(config, gate, up, down, x):
    g, u = x @ gate, x @ up
    if config.activation == "swiglu":
        return (g * sigmoid(g) * u) @ down
    b1, b2 = config.situ_beta, config.situ_linear_beta
    return (b1 * np.tanh(g / b1) * sigmoid(g) * b2 * np.tanh(u / b2)) @ down


def mixture(config, p, x, bias, real):
    scores = sigmoid(x @ p["router"])
    z = x @ p["latent_down"] if "latent_down" in p else x
    u = np.zeros_like(z)
    for t in np.flatnonzero(real):
        chosen = np.argsort(-(scores[t] + bias), kind="stable")[: config.experts_per_token]
        for e in chosen:
            weight = config.routed_scaling * scores[t, e] / scores[t, chosen].sum()
            u[t] += weight * ffn(config, p["expert_gate"][e], p["expert_up"][e], p["expert_down"][e], z[t])
    if "latent_up" in p:
        u = rms_norm(u, p["latent_norm"]["weight"], config.norm_eps) @ p["latent_up"]
    return u + ffn(config, p["shared"]["gate"], p["shared"]["up"], p["shared"]["down"], x)


# ---- layers --------------------------------------------------------------------------------------------------------------


def check_layer(config, kind, reference, **how):
    """A layer's attention against a reference that takes one sequence, in float64."""
    params = draw(config, kind)
    x, segments = inputs()
    p = in_float64(params["attn"])
    expected = [reference(config, p, row, ids)[0] for row, ids in zip(in_float64(x), segments, strict=True)]
    assert_same(attend(config, kind, params, x, segments, **how), np.stack(expected))


@pytest.mark.quick
@pytest.mark.parametrize("config", [CONFIG, KIMI_LINEAR], ids=["bounded gate", "softplus, low-rank output gate"])
def test_kda_layer_is_its_recurrence_token_by_token(config):
    check_layer(config, "K", kda_layer)


@pytest.mark.quick
@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("config", [CONFIG, KIMI_LINEAR], ids=["query latent, output gate", "neither"])
def test_mla_layer_is_softmax_over_the_document_so_far(config, absorbed):
    check_layer(config, "M", mla_layer, absorbed=absorbed)


@pytest.mark.quick
@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("config", [CONFIG, KIMI_LINEAR], ids=["query latent, output gate", "neither"])
def test_mla_reports_the_largest_logit_that_a_real_token_sees(config, absorbed):
    """Loud keys where they are last of their document, and loud padding, have larger logits: none of them counts."""
    params = draw(config, "M")
    x, segments = inputs()
    x[0, 39] *= 9
    x[1, 60] *= 4
    x[1, -10:] *= 20
    ids = np.where(np.arange(T) < T - 10, 0, np.array([[0], [-1]])).astype(np.int32)
    segments = np.where(ids < 0, segments.max() + 1, segments).astype(np.int32)
    p = in_float64(params["attn"])
    logits = [mla_layer(config, p, row, of)[1] for row, of in zip(in_float64(x), segments, strict=True)]
    real = np.stack([np.where(row[:, None] >= 0, head, -np.inf) for row, head in zip(ids, logits, strict=True)])
    assert (np.stack(logits).max((0, 2, 3)) > 1.5 * real.max((0, 2, 3))).all()
    no_documents = mla_layer(config, p, in_float64(x[0]), segments[0] * 0)[1]
    assert (no_documents.max((1, 2)) > 1.1 * real.max((0, 2, 3))).any()
    assert_same(report(config, "M", params, x, segments, ids, absorbed)[1], real.max((0, 2, 3)))
    assert (np.asarray(report(config, "M", params, x, segments, ids * 0 - 1, absorbed)[1]) == -np.inf).all()


@pytest.mark.quick
@pytest.mark.parametrize("config", [CONFIG, KIMI_LINEAR], ids=["situ", "swiglu"])
def test_dense_ffn_is_its_gated_activation(config):
    params = draw(config, "dense")
    x, segments = inputs()
    run = jax.jit(lambda params, x, ids: lm.bind(config, "dense", params)(x, Tokens(ids, ids)))
    p = in_float64(params)
    assert_same(run(params, x, segments), ffn(config, p["gate"], p["up"], p["down"], in_float64(x)))


@pytest.mark.quick
@pytest.mark.parametrize(
    "config", [CONFIG, dataclasses.replace(KIMI_LINEAR, latent_size=None)], ids=["latent, situ", "no latent, swiglu"]
)
def test_mixture_weighs_by_scores_and_norms_before_the_up_projection(config):
    params = draw(config, "K")
    x, segments = inputs()
    bias = np.linspace(-0.3, 0.3, config.num_experts).astype(np.float32)
    ids = np.where(np.arange(T) < T - 5, segments, -1)  # the last tokens are padding: shared experts alone
    run = jax.jit(lambda params, *args: lm.bind(config, "K", params).moe(*args[:2], Tokens(*args[2:]))[0])
    p = in_float64(params["moe"])
    expected = np.stack([mixture(config, p, in_float64(x[b]), bias, ids[b] >= 0) for b in range(B)])
    scores = sigmoid(in_float64(x) @ p["router"])
    top = lambda a: np.sort(np.argsort(-a, -1)[..., : config.experts_per_token], -1)
    assert (top(scores) != top(scores + bias)).any(-1).mean() > 0.1  # the bias does choose
    assert_same(run(params, x, bias, segments, ids), expected)


@functools.partial(jax.jit, static_argnames="config")
def kda_pieces(config, attn, rows, segments, g, beta, halo, halo_segments, state):
    """Convolution and recurrence of the layer over one part of a sequence, from what the part before left."""
    filters = jnp.concatenate([attn[f"{name}_conv"] for name in "qkv"], -1)
    y = short_conv(rows, filters, segments, halo=halo, halo_segment_ids=halo_segments)
    q, k, v = jnp.split(jax.nn.silu(y), [config.kda_key_dim, 2 * config.kda_key_dim], -1)
    q, k = (a * jax.lax.rsqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    bound = config.gate_lower_bound
    return kda(q, k, v, g, beta, initial_state=state, segment_ids=segments, gate_lower_bound=bound)


@pytest.mark.parametrize(
    "split", [pytest.param(s, marks=[pytest.mark.quick if s in QUICK_SPLITS else pytest.mark.slow]) for s in SPLITS]
)
def test_kda_layer_continues_a_split_sequence(split):
    """The last W − 1 rows before the convolution and one state are all that the second part needs."""
    config, params = CONFIG, draw(CONFIG, "K")
    x, segments = (a[:1] for a in inputs())
    p = in_float64(params["attn"])
    x64, W = in_float64(x[0]), config.conv_width
    rows = np.concatenate([projected(p, x64, name) for name in "qkv"], -1)
    whole = [rows, segments[0], log_decay(config, p, x64), sigmoid(x64 @ p["beta_proj"])]
    halo, halo_segments = np.zeros((W - 1, *rows.shape[1:])), np.full(W - 1, -1)
    state = np.zeros((1, config.num_heads, config.kda_key_dim, config.kda_value_dim), np.float32)
    as_batch = lambda a: jnp.asarray(a[None], jnp.int32 if a.dtype.kind == "i" else jnp.float32)
    outputs = []
    for part in (slice(0, split), slice(split, T)):
        arrays = [as_batch(a) for a in (*(a[part] for a in whole), halo, halo_segments)]
        o, state = kda_pieces(config, params["attn"], *arrays, state)
        outputs.append(np.asarray(o[0], np.float64))
        halo = np.concatenate([halo, rows[part]])[-(W - 1) :]
        halo_segments = np.concatenate([halo_segments, segments[0, part]])[-(W - 1) :]
    together = kda_output(config, p, x64, np.concatenate(outputs))
    assert_same(together, np.asarray(attend(config, "K", params, *(jnp.concatenate([a, a]) for a in (x, segments)))[0]))
    expected, last = kda_layer(config, p, x64, segments[0])
    assert_same(together, expected)
    assert_same(state[0], last)


# ---- initial values and learning rate ------------------------------------------------------------------------------------


def assert_mean(values, mean, std):
    """The mean of independent values, within five standard errors (seeds are fixed: it holds or it does not)."""
    values = np.asarray(values, np.float64)
    assert abs(values.mean() - mean) <= 5 * std * values.size**-0.5, (values.mean(), mean)


@pytest.mark.quick
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
def test_initial_values_have_the_published_distributions(bound):
    config = dataclasses.replace(
        tiny.MODEL, num_heads=256, gate_lower_bound=bound, output_gate_rank=None if bound else 4, init_range=0.03
    )
    seen = set()
    for part in ("K", "M", "dense", "embed", "head"):
        params = jax.jit(functools.partial(lm.init_part, config, part))(jax.random.key(5))
        for path, a in jax.tree_util.tree_leaves_with_path(params):
            name, a = path[-1].key, np.asarray(a, np.float64)
            if name == "a_log":
                if bound is not None:
                    np.testing.assert_array_equal(a, 0)
                else:
                    rate = np.exp(a)  # uniform in (1, 16)
                    assert 1 - 1e-5 <= rate.min() and rate.max() <= 16 + 1e-4
                    assert_mean(rate, 8.5, 15 / 12**0.5)
            elif name == "gate_bias":
                step = np.log1p(np.exp(a))  # log-uniform in [1e-3, 0.1]
                assert 0.999e-3 <= step.min() and 0.098 < step.max() <= 0.1001  # 2048 draws fill it; float32 rounds
                assert_mean(np.log(step), np.log(0.01), np.log(100) / 12**0.5)
            elif name.endswith("_conv"):
                limit = config.conv_width**-0.5  # uniform
                assert np.abs(a).max() <= limit
                assert_mean(a, 0, limit / 3**0.5)
                assert_mean(a**2, limit**2 / 3, limit**2 * (4 / 45) ** 0.5)
            elif name == "query":
                np.testing.assert_array_equal(a, 0)
            elif a.ndim == 1:
                assert name == "weight"
                np.testing.assert_array_equal(a, 1)
            else:
                name = "matrix"
                assert_mean(a, 0, config.init_range)
                assert_mean(a**2, config.init_range**2, config.init_range**2 * 2**0.5)
                inside = 0.682689  # of a normal distribution within one standard deviation
                assert_mean(np.abs(a) < config.init_range, inside, (inside * (1 - inside)) ** 0.5)
            seen.add(name)
    assert seen == {"a_log", "gate_bias", "q_conv", "k_conv", "v_conv", "query", "weight", "matrix"}


@pytest.mark.quick
def test_learning_rate_warms_up_linearly_then_falls_to_a_tenth():
    peak, steps, warmup = 0.02, 200, 10
    config = StepConfig(learning_rate=peak, steps=steps, warmup=warmup / steps)
    rate = jax.jit(jax.vmap(learning_rate_schedule(config)))(jnp.arange(steps))
    expected = np.zeros(steps)
    for n in range(steps):
        if n <= warmup:  # from a share of the peak, never from nothing
            expected[n] = peak / warmup + (peak - peak / warmup) * n / warmup
        else:
            expected[n] = peak * (0.1 + 0.9 * (1 + np.cos(np.pi * (n - warmup) / (steps - warmup))) / 2)
    np.testing.assert_allclose(rate, expected, rtol=1e-5)  # float32
    np.testing.assert_allclose(rate[np.array([0, warmup, steps - 1])], [peak / warmup, peak, peak / 10], rtol=1e-3)
