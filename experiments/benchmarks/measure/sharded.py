"""Memory, traffic and estimated cycles of a train step on several devices.

The step is compiled for GPUs, or for a slice of TPUs, that are not attached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from experiments.benchmarks.models.nnx_gpt2 import GPT2 as NNXGPT2
from experiments.models import attention
from experiments.models.gpt2 import GPT2
from experiments.models.llama import Llama
from experiments.models.transformer import aligned
from jaxmp.inspect import audit, roofline
from jaxmp.sharding import Sharding
from jaxmp.sharding.specs import axes_in_spec

Way = Literal["linen", "autocast", "nnx"]
POLICY = "mixed_bfloat16"
"""The policy of each way."""
FSDP = {"**/kernel": P(None, "fsdp")}
"""The specs of kernels. XLA gathers this axis without changing the layout."""
COLUMNS, ROWS = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
TENSOR_OF_LLAMA = {
    **{f"**/{name}/kernel": COLUMNS for name in ("query", "key", "value", "gate", "up")},
    **{f"**/{name}/kernel": ROWS for name in ("attention_output", "down")},
    **{f"{name}/embedding": P("tensor", "fsdp") for name in ("embeddings", "output")},
}
"""The specs of Llama's products on a mesh with the axis ``"tensor"``.

The first products of attention and of the perceptron are split by columns, so by heads, and the second ones by rows.
"""


def measure(
    model: GPT2 | Llama, target: str, topology: str | None, sizes: dict[str, int], way: Way = "linen"
) -> dict[str, Any]:
    """Return the memory and the traffic of a train step on each device.

    The traffic is the bytes that a device sends. The batch has 8 sequences for each device if they have at most 1,024
    tokens, else 2. The blocks are a loop, and the backward pass recomputes each block.

    Args:
      model: the model, which gives the sizes.
      target: a name that :func:`jaxmp.inspect.compiled.targets.target_of` reads.
      topology: the cluster of GPUs, as in ``"1x2x4"``; None for a slice of TPUs, which ``target`` names.
      sizes: the sizes of the mesh axes by name. Params are split along the axis ``"fsdp"``. The batch is split along
        all axes but ``"tensor"``, which splits Llama's products.
      way: ``"linen"`` and ``"nnx"`` are jaxmp's train step of that model under a policy. ``"autocast"`` is jaxmp's
        train step of the Linen model under autocast. Llama has the ways ``"linen"`` and ``"autocast"`` only.
    """
    axes = tuple(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), axes, (AxisType.Auto,) * len(axes))
    tx = jaxmp.loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)), jaxmp.NoOpLossScale())
    batch_axes = tuple(name for name in axes if name != "tensor")
    params, blocks, loss_fn = _program(model, way)
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
    rules = TENSOR_OF_LLAMA if "tensor" in axes else FSDP
    specs = jaxmp.sharding.fsdp_specs(state, mesh, rules=rules, stacked=[blocks])
    policy = POLICY if way == "autocast" else None
    step = jaxmp.make_train_step(loss_fn, policy=policy, sharding=Sharding(mesh, specs.params))

    def placed(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    examples = (2 if model.sequence > 1024 else 8) * mesh.size
    tokens = placed(jax.ShapeDtypeStruct((examples, model.sequence), jnp.int32), P(batch_axes))
    args = jax.tree.map(placed, state, specs), {"inputs": tokens, "labels": tokens}
    with attention.implementation(attention.implementation_on(target)):
        audited = audit(step, device=target, topology=topology)(*args)
        is_tpu = jaxmp.hardware.detect(target).platform == "tpu"
        parts = roofline(step, device=target)(*args).parts if is_tpu else {}
    plan: Any = audited.memory
    wide = [row for row in plan.collectives.rows if (row.kind, row.dtype) == ("all-gather", "float32")]
    return {
        "way": way, "policy": POLICY, "topology": topology or target, "params": plan.params, "gpus": mesh.size,
        "mesh": sizes,
        "batch": f"{examples}×{model.sequence}", "peak": plan.peak, "by_kind": plan.by_kind,
        "wire": plan.collectives.wire, "ideal": ideal_wire(args[0].params, batch_axes),
        "wide_gathers": sum(row.count for row in wide if row.bytes > 1e6),
        "sent": {" ".join(key): wire for key, wire in plan.collectives.totals.items()},
        "tokens": examples * model.sequence,
        "parts": parts,  # milliseconds by the compiler's cycles, the memory's bandwidth and the links
        # Round trips are left out. A bias is added in float32, so that its gradient is summed in float32. Therefore
        # the cotangent is cast to float32 and back.
        "findings": [str(finding) for finding in audited.findings if finding.kind != "round-trip"],
    }  # fmt: skip


def ideal_wire(params: Any, axes: Iterable[str]) -> float:
    """Return the minimum number of bytes that one device sends in a training step.

    If n devices split the batch and no other axes split the params, the minimum is 8 (n - 1)/n bytes per weight. For
    this minimum, each weight is gathered in 16 bits for the forward pass, and again for the backward pass. The gradient
    of each weight is reduced in float32.

    Args:
      params: a tree of arrays or shapes, each with a ``NamedSharding``.
      axes: the mesh axes that split the batch.
    """
    batch_axes = set(axes)
    return sum((_ideal_wire_of(leaf, batch_axes) for leaf in jax.tree.leaves(params)), 0.0)


def _ideal_wire_of(leaf: Any, batch_axes: set[str]) -> float:
    mesh, names = leaf.sharding.mesh, set(axes_in_spec(leaf.sharding.spec))

    def size(axes: set[str]) -> int:
        return math.prod(mesh.shape[name] for name in axes)

    parts, copies = size(names & batch_axes), size(batch_axes - names)
    numbers = math.prod(leaf.shape) / size(names - batch_axes)
    return 8 * numbers * ((parts - 1) / parts + (copies - 1) / copies / parts)


def _program(model: GPT2 | Llama, way: Way) -> tuple[Any, str, Callable[..., Any]]:
    """Return the params' shapes, the name of their stacked part, and the loss function."""
    if way == "nnx":
        sizes = (aligned(model.vocabulary), model.sequence, model.layers, model.width, model.heads, True)
        plain = nnx.eval_shape(lambda: NNXGPT2(*sizes, rngs=nnx.Rngs(0)))
        graph, shapes = nnx.split(jaxmp.nnx.apply_policy(plain, POLICY))

        def of_nnx(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
            return nnx.merge(graph, params).loss(batch["inputs"], batch["labels"]), model_state

        return nnx.as_pure(shapes), "blocks", of_nnx
    blocks, linen = "blocks", model
    if isinstance(model, GPT2):
        blocks, linen = "h_0", model.clone(loop=True, remat="full")
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(lambda: linen.init(jax.random.key(0), tokens, tokens, method="loss"))["params"]
    precise = linen if way == "autocast" else jaxmp.linen.apply_policy(linen, POLICY)

    def of_linen(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return precise.apply({"params": params}, batch["inputs"], batch["labels"], method="loss"), model_state

    return params, blocks, of_linen
