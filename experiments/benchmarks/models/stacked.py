"""Shard GPT-2 over many devices by hand, on a mesh with axes of type Explicit.

The program does what FSDP2 does in torch. Params and optimizer state are split. A scan over stacked blocks gathers the
weights of one block at a time in half precision. The backward pass gathers them again and recomputes the block.
Gradients are reduced in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxmp
from experiments.models.activations import gelu
from experiments.models.attention import attention
from experiments.models.gpt2 import GPT2

_CHUNK = 128
"""The tokens per sequence in a chunk of the loss, which limits the memory of the logits."""


def stack(params: Any) -> Any:
    """Return the params of :class:`GPT2` with its blocks stacked under ``h``.

    The blocks are stacked along axis 0.
    """
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("h_")}
    blocks = [params[f"h_{n}"] for n in range(len(params) - len(rest))]
    return {**rest, "h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def make_params(model: GPT2) -> Any:
    """Return fresh float32 params, stacked by :func:`stack`."""
    return stack(model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])


def loss_fn_of(
    model: GPT2, specs: Any, axes: tuple[str, ...] = ("fsdp",), dtype: Any = "bfloat16"
) -> Callable[..., Any]:
    """Return the loss function of a train step.

    The loss is the mean cross-entropy of ``labels``, float32. A batch has ``inputs`` and ``labels``, both (batch,
    sequence).

    Args:
      model: the model, which gives the sizes.
      specs: the specs of the stacked params.
      axes: the mesh axes over which the batch is split.
      dtype: the dtype of the products.
    """
    gather = functools.partial(jaxmp.sharding.gather, dtype=dtype, axes=axes)
    of_block = jax.tree.map(lambda spec: P(*spec[1:]), specs["h"], is_leaf=lambda leaf: isinstance(leaf, P))
    attend = jax.shard_map(
        functools.partial(attention, causal=True), in_specs=(P(axes),) * 3, out_specs=P(axes), check_vma=False
    )

    def norm(x: jax.Array, params: Any) -> jax.Array:
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
        return (scaled * params["scale"] + params["bias"]).astype(dtype)

    def dense(x: jax.Array, params: Any) -> jax.Array:
        return ((x @ params["kernel"].astype(dtype)).astype(jnp.float32) + params["bias"]).astype(dtype)

    def block(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        params = gather(params, of_block)
        batch, tokens, width = x.shape
        qkv = dense(norm(x, params["ln_1"]), params["attn"]["c_attn"])
        q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, model.heads, width // model.heads), 2, 0)
        x = x + dense(attend(q, k, v).reshape(x.shape), params["attn"]["c_proj"])
        inner = gelu(dense(norm(x, params["ln_2"]), params["mlp"]["c_fc"]))
        return x + dense(inner, params["mlp"]["c_proj"]), None

    def looked_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table.at[tokens].get(out_sharding=P(axes))

    def backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
        table, tokens = residuals
        (summed,) = jax.vjp(lambda table: looked_up(table, tokens), table.astype(jnp.float32))[1](
            cotangent.astype(jnp.float32)
        )
        return summed.astype(table.dtype), None

    rows = jax.custom_vjp(looked_up)  # sums the gradients of equal tokens in float32
    rows.defvjp(lambda *args: (looked_up(*args), args), backward)

    def losses(total: jax.Array, chunk: Any, table: jax.Array) -> jax.Array:
        x, labels = chunk
        logits = jnp.einsum("btd,vd->btv", x, table).astype(jnp.float32)
        token = jnp.arange(logits.shape[-1])
        logits = jnp.where(token < model.vocabulary, logits, -jnp.inf)
        logit = jnp.sum(jnp.where(token == labels[..., None], logits, 0), -1)
        return total + jnp.sum(jax.nn.logsumexp(logits, -1) - logit, -1)

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = None) -> tuple[jax.Array, Any]:
        names = ("wte", "wpe")
        tables = gather({name: params[name] for name in names}, {name: specs[name] for name in names})
        table, positions = (tables[name]["embedding"].astype(dtype) for name in names)
        places = jax.lax.broadcasted_iota(jnp.int32, batch["inputs"].shape, 1, out_sharding=P(axes))
        x = rows(table, batch["inputs"]) + rows(positions, places)
        x, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["h"])
        chunks = jax.tree.map(
            lambda leaf: jnp.moveaxis(
                leaf.reshape(leaf.shape[0], -1, min(_CHUNK, leaf.shape[1]), *leaf.shape[2:]), 1, 0
            ),
            (norm(x, params["ln_f"]), batch["labels"]),
        )
        turn = jax.checkpoint(losses, prevent_cse=False)
        start = jnp.zeros_like(batch["labels"][:, 0], jnp.float32)
        total, _ = jax.lax.scan(lambda total, chunk: (turn(total, chunk, table), None), start, chunks)
        return jnp.sum(total) / batch["labels"].size, model_state

    return loss_fn
