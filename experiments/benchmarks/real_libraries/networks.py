"""Networks: equinox, Haiku, Flax, transformers, and losses of optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax, random

from experiments.benchmarks.real_libraries.registry import Made, program


def _cross_entropy(logits: jax.Array) -> jax.Array:
    rows = logits.reshape(-1, logits.shape[-1])
    labels = jnp.arange(len(rows)) % rows.shape[-1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(rows), labels[:, None], axis=-1))


def _of_equinox(model, call) -> Made:
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)
    return lambda params: call(eqx.combine(params, static)), params


@program("equinox", "recurrent network (GRU)")
def equinox_gru() -> Made:
    import equinox as eqx

    keys = random.split(random.key(0), 3)
    model = eqx.nn.GRUCell(8, 32, key=keys[0]), eqx.nn.Linear(32, 4, key=keys[1])
    xs = random.normal(keys[2], (16, 24, 8))

    def call(model):
        cell, head = model

        def last(xs):
            return lax.scan(lambda state, x: (cell(x, state), None), jnp.zeros(32), xs)[0]

        return _cross_entropy(jax.vmap(head)(jax.vmap(last)(xs)))

    return _of_equinox(model, call)


@program("equinox", "vision transformer")
def equinox_vit() -> Made:
    import equinox as eqx

    keys = iter(random.split(random.key(0), 20))

    class Block(eqx.Module):
        first: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        second: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self):
            self.first, self.second = eqx.nn.LayerNorm(32), eqx.nn.LayerNorm(32)
            self.attention = eqx.nn.MultiheadAttention(4, 32, key=next(keys))
            self.mlp = eqx.nn.MLP(32, 32, 64, 1, jax.nn.gelu, key=next(keys))

        def __call__(self, x):
            normed = jax.vmap(self.first)(x)
            x = x + self.attention(normed, normed, normed)
            return x + jax.vmap(self.mlp)(jax.vmap(self.second)(x))

    model = (eqx.nn.Linear(48, 32, key=next(keys)), [Block(), Block(), Block()], eqx.nn.Linear(32, 10, key=next(keys)))
    patches = random.normal(next(keys), (8, 16, 48))

    def call(model):
        embed, blocks, head = model

        def of_one(patches):
            x = jax.vmap(embed)(patches)
            for block in blocks:
                x = block(x)
            return head(x.mean(0))

        return _cross_entropy(jax.vmap(of_one)(patches))

    return _of_equinox(model, call)


@program("equinox", "score-based diffusion")
def equinox_diffusion() -> Made:
    import equinox as eqx

    keys = random.split(random.key(0), 5)
    model = eqx.nn.MLP(17, 16, 64, 3, jax.nn.silu, key=keys[0])
    x, noise = random.normal(keys[1], (64, 16)), random.normal(keys[2], (64, 16))
    times = random.uniform(keys[3], (64,), minval=0.01, maxval=5.0)

    def call(model):
        def of_one(x, noise, t):
            std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
            score = model(jnp.append(x * jnp.exp(-t / 2) + std * noise, t))
            return (1 - jnp.exp(-t)) * jnp.mean((score + noise / std) ** 2)

        return jnp.mean(jax.vmap(of_one)(x, noise, times))

    return _of_equinox(model, call)


@program("equinox", "physics-informed network")
def equinox_pinn() -> Made:
    import equinox as eqx

    model = eqx.nn.MLP(2, "scalar", 32, 3, jnp.tanh, key=random.key(0))
    points = random.uniform(random.key(1), (64, 2))

    def call(model):
        def residual(point):
            hessian = jax.hessian(model)(point)
            return hessian[0, 0] + hessian[1, 1] - jnp.sin(jnp.pi * point[0]) * jnp.sin(jnp.pi * point[1])

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return _of_equinox(model, call)


def _of_haiku(network, *args) -> Made:
    import haiku as hk

    pure = hk.without_apply_rng(hk.transform(network))
    return lambda params: pure.apply(params, *args), pure.init(random.key(0), *args)


@program("dm-haiku", "recurrent network (LSTM)")
def haiku_lstm() -> Made:
    import haiku as hk

    def network(xs):
        core = hk.DeepRNN([hk.LSTM(32), jax.nn.tanh, hk.LSTM(32)])
        results, _ = hk.dynamic_unroll(core, xs, core.initial_state(8))
        return _cross_entropy(hk.Linear(6)(results))

    return _of_haiku(network, random.normal(random.key(1), (20, 8, 8)))


@program("dm-haiku", "transformer")
def haiku_transformer() -> Made:
    import haiku as hk

    def network(tokens):
        x = hk.Embed(50, 32)(tokens) + hk.get_parameter("positions", (16, 32), init=hk.initializers.TruncatedNormal())
        mask = jnp.tril(jnp.ones((1, 1, 16, 16)))
        scale = hk.initializers.VarianceScaling(0.5)
        for _ in range(2):
            normed = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(4, 8, w_init=scale, model_size=32)(normed, normed, normed, mask=mask)
            x = x + hk.nets.MLP([64, 32], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))
        return _cross_entropy(hk.Linear(50)(hk.LayerNorm(-1, True, True)(x)))

    return _of_haiku(network, random.randint(random.key(1), (8, 16), 0, 50))


@program("dm-haiku", "vector-quantised autoencoder")
def haiku_vq() -> Made:
    import haiku as hk

    def network(images):
        encoded = hk.Conv2D(8, 3, 2)(jax.nn.relu(hk.Conv2D(16, 3, 2)(images)))
        table = hk.get_parameter("codes", (8, 32), init=hk.initializers.RandomNormal(0.5))
        flat = encoded.reshape(-1, 8)
        distances = jnp.sum(flat**2, 1, keepdims=True) - 2 * flat @ table + jnp.sum(table**2, 0)
        codes = table.T[jnp.argmin(distances, 1)].reshape(encoded.shape)
        through = encoded + lax.stop_gradient(codes - encoded)
        decoded = hk.Conv2DTranspose(3, 3, 2)(jax.nn.relu(hk.Conv2DTranspose(16, 3, 2)(through)))
        commitment = jnp.mean((lax.stop_gradient(codes) - encoded) ** 2)
        of_codes = jnp.mean((codes - lax.stop_gradient(encoded)) ** 2)
        return jnp.mean((decoded - images) ** 2) + 0.25 * commitment + of_codes

    return _of_haiku(network, random.normal(random.key(1), (4, 16, 16, 3)))


@program("flax", "recurrent network (Linen, LSTM)")
def linen_lstm() -> Made:
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, xs):
            return nn.Dense(6)(nn.RNN(nn.OptimizedLSTMCell(32))(xs))

    xs = random.normal(random.key(1), (8, 20, 8))
    params = Network().init(random.key(0), xs)
    return lambda params: _cross_entropy(Network().apply(params, xs)), params


@program("flax", "convolutions with group normalisation (Linen)")
def linen_convolutions() -> Made:
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = x + nn.Conv(16, (3, 3))(nn.silu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x))))
            return nn.Dense(10)(x.mean((1, 2)))

    x = random.normal(random.key(1), (8, 12, 12, 16))
    params = Network().init(random.key(0), x)
    return lambda params: _cross_entropy(Network().apply(params, x)), params


@program("flax", "mixture of experts (NNX)")
def nnx_experts() -> Made:
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.gate = nnx.Linear(16, 4, rngs=rngs)
            self.up = nnx.Param(random.normal(rngs.params(), (4, 16, 32)) / 4)
            self.down = nnx.Param(random.normal(rngs.params(), (4, 32, 16)) / 6)
            self.head = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x):
            weights, chosen = lax.top_k(jax.nn.softmax(self.gate(x)), 2)
            combine = jnp.sum(jax.nn.one_hot(chosen, 4) * weights[..., None], 1)
            hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, self.up[...]))
            return self.head(x + jnp.einsum("teh,ehd,te->td", hidden, self.down[...], combine))

    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    x = random.normal(random.key(1), (64, 16))
    return lambda params: _cross_entropy(nnx.merge(graph, params, rest)(x)), params


def _mamba(parallel: bool) -> Made:
    """Return a language model of two Mamba blocks.

    The code follows small JAX implementations of Mamba.
    """
    import flax.linen as nn

    class Block(nn.Module):
        inner: int = 32
        states: int = 4

        @nn.compact
        def __call__(self, x):
            u, gate = jnp.split(nn.Dense(2 * self.inner, use_bias=False)(x), 2, axis=-1)
            u = nn.silu(nn.Conv(self.inner, (4,), feature_group_count=self.inner, padding="CAUSAL")(u))
            delta, b, c = jnp.split(nn.Dense(2 + 2 * self.states, use_bias=False)(u), [2, 2 + self.states], axis=-1)
            delta = nn.softplus(nn.Dense(self.inner)(delta))
            log_a = self.param("log_a", lambda _: jnp.log(jnp.tile(jnp.arange(1.0, self.states + 1), (self.inner, 1))))
            decay = jnp.exp(jnp.einsum("bld,dn->bldn", delta, -jnp.exp(log_a)))
            added = jnp.einsum("bld,bln,bld->bldn", delta, b, u)
            if parallel:
                states = lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (decay, added), axis=1)[1]
            else:

                def turn(state, now):
                    state = now[0] * state + now[1]
                    return state, state

                start = jnp.zeros((x.shape[0], self.inner, self.states))
                states = lax.scan(turn, start, (decay.swapaxes(0, 1), added.swapaxes(0, 1)))[1].swapaxes(0, 1)
            y = jnp.einsum("bldn,bln->bld", states, c) + u * self.param("skip", nn.initializers.ones, (self.inner,))
            return x + nn.Dense(x.shape[-1], use_bias=False)(y * nn.silu(gate))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(50, 16)(tokens)
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(50)(nn.RMSNorm()(x))

    tokens = random.randint(random.key(1), (4, 24), 0, 50)
    params = Network().init(random.key(0), tokens)
    return lambda params: _cross_entropy(Network().apply(params, tokens)), params


@program("flax", "Mamba, turn by turn")
def mamba() -> Made:
    return _mamba(parallel=False)


@program("flax", "Mamba, parallel scan")
def mamba_parallel() -> Made:
    return _mamba(parallel=True)


def _of_transformers(name: str, config: str, **sizes) -> Made:
    import transformers

    config = getattr(transformers, config)(vocab_size=100, **sizes)
    model = getattr(transformers, name)(config, seed=0)
    tokens = random.randint(random.key(1), (4, 16), 0, 100)
    more = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}

    def loss(params):
        return _cross_entropy(model(input_ids=tokens, params=params, train=False, **more).logits)

    return loss, model.params


@program("transformers", "BERT")
def bert() -> Made:
    return _of_transformers(
        "FlaxBertForMaskedLM", "BertConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip


@program("transformers", "GPT-2")
def gpt2() -> Made:
    return _of_transformers("FlaxGPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=32)


@program("transformers", "BART")
def bart() -> Made:
    return _of_transformers(
        "FlaxBartForConditionalGeneration", "BartConfig", d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=32, pad_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip


@program("transformers", "Llama")
def llama() -> Made:
    return _of_transformers(
        "FlaxLlamaForCausalLM", "LlamaConfig", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip


@program("optax", "connectionist temporal classification")
def ctc() -> Made:
    import optax

    keys = random.split(random.key(0), 3)
    params = {"w1": random.normal(keys[0], (8, 32)) / 3, "w2": random.normal(keys[1], (32, 12)) / 6}
    xs = random.normal(keys[2], (4, 30, 8))
    labels = random.randint(random.key(1), (4, 8), 1, 12)

    def loss(params):
        logits = jnp.tanh(xs @ params["w1"]) @ params["w2"]
        return jnp.mean(optax.ctc_loss(logits, jnp.zeros((4, 30)), labels, jnp.zeros((4, 8))))

    return loss, params


@program("optax", "contrastive loss (NT-Xent)")
def contrastive() -> Made:
    import optax

    x = random.normal(random.key(0), (32, 16))
    params = {"w1": random.normal(random.key(1), (16, 32)) / 4, "w2": random.normal(random.key(2), (32, 8)) / 6}
    labels = jnp.arange(32) // 2

    def loss(params):
        return optax.ntxent(jax.nn.relu(x @ params["w1"]) @ params["w2"], labels, temperature=0.1)

    return loss, params
