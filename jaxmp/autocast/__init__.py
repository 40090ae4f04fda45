"""Mixed precision for a whole function: each operation in the dtype that suits it, decided on its graph.

``autocast(fun, policy)`` traces ``fun`` as it is written, decides on the whole program, and computes it with each
operation in its precision. ``cast_plan(fun, policy)(*args)`` shows the decisions and runs nothing. What it means:

**What is half.** Matrix products and convolutions take operands of the policy's compute dtype, accumulate in float32
and return the compute dtype. So does what stands between two of them by any path: biases, activations, dropout, the
residual stream. What leads to no product (the last bias, a loss) and what is made of arguments only stays as it was
written. A function without a product is not changed at all.

**What is float32.** Exponentials, logarithms, powers and special functions; sums and all that accumulates, scatters
that add included; factorisations and Fourier transforms; products of the highest precision. Islands are float32 from
their first operation on: a softmax (rounded where it ends if a product reads it), log-softmax, logsumexp, variances
and norms, squared errors, masks and other constants that half cannot hold, what a factorisation reads. A float32 value
makes float32 what is computed from it, up to the next product or activation, but not a residual stream that it joins.

**Loops.** A carry has one dtype: half if a product lies on its way round, float32 if it only adds up. Weights stay
float32 arguments, cast at each use, so that the cotangents of all uses are summed in float32.

**Derivatives.** ``grad(autocast(f))`` differentiates the half program: its backward products are half and what it
saves is half. Rules of ``custom_jvp`` and ``custom_vjp`` are kept, and run under the same policy. ``checkpoint`` keeps
its policy. ``autocast(grad(f))`` has the same products.

**What is left alone.** Integers, bools, keys, float64, complex numbers and fp8; random bits; an ``astype`` of the
author that rounds; kernels, callbacks and references, and every primitive that jaxmp does not know. Results keep their
dtypes (a pure policy such as ``"bfloat16"`` casts them to its output dtype). What another autocast has written inside.

**Who decides otherwise**, the most specific first: ``with jaxmp.precision("float32"):`` around code; an override by
path of modules or scopes; by primitive; by class of primitives (:mod:`jaxmp.autocast.classes`).

**Attention.** While a function is traced, a float32 call of ``jax.nn.dot_product_attention`` casts to half and runs
on cuDNN's fused kernel, on a GPU that has one for it; ``implementation="xla"`` and float32 regions are respected.

Sharp edges:

- An ``astype(float32)`` of what is float32 already leaves no trace, nor does a module's ``dtype=float32``: mark the
  code with :func:`jaxmp.precision`, or override its path.
- Put autocast around the loss, not around a loop that updates params: params carried round a loop with products in it
  look like a residual stream, and would be carried in half.
- Names of modules are on the name stack of Linen; NNX puts none there, :func:`jaxmp.nnx.apply_policy` does.
- ``from jax.nn import dot_product_attention`` before the trace keeps JAX's function, which runs in half but not on
  cuDNN.
- float16 has float16's range: a product beyond 65504 is infinite, and gradients want a loss scale. XLA's float16
  ``logistic`` is 0 below -11.
- A program that reads its own dtypes (``x.dtype == float32``) sees what was written, not what will run.
- The bodies of ``custom_vmap``, ``linear_call`` and of kernels are not looked into; the plan lists their products.

The colouring follows TensorFlow's ``auto_mixed_precision`` graph pass, the scheme of float32 params and half products
Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def autocast(fun: F, policy: Any, overrides: Mapping[str, str] | None = None) -> F:
    """``fun`` with each of its operations in the precision that suits it, decided on its whole graph.

    Matrix products and convolutions run in the policy's compute dtype, what needs range or adds up many terms in
    float32, the rest in what its neighbours have; :mod:`jaxmp.autocast` states the rules, :func:`jaxmp.cast_plan`
    shows the decisions. ``fun`` is traced as it is written, on its own dtypes, and stays unedited: its params stay
    float32, its results have the dtypes that they had (under a pure policy such as ``"bfloat16"``: the output dtype).
    It composes with every transformation of JAX, around it and inside it.

    Args:
      fun: any function of arrays in pytrees that JAX can trace. Arguments that are no arrays (Python numbers, strings,
        None, functions) reach it as they are.
      policy: whatever :func:`jaxmp.get_policy` reads and computes in float16 or bfloat16; ``"O1"`` is mixed_float16.
        ``"float32"`` is for a part of a larger function under autocast, which then stays float32 as a whole.
      overrides: ``"**/head"`` (a path of modules or scopes, and everything below), ``"primitive:exp"`` or
        ``"class:accumulation"`` to ``"float32"`` or ``"half"``. A path goes before an operation, a region marked with
        :func:`jaxmp.precision` before both.

    Raises:
      ValueError: the policy has no half compute dtype; float16 on a TPU; an override is none, or (in the call) matched
        nothing.
      TypeError: the policy is a PolicyMap.

    >>> def loss(w, x):
    ...     return jax.nn.logsumexp(jax.nn.relu(x @ w) @ w)
    >>> half = jaxmp.autocast(loss, "mixed_bfloat16")
    >>> w = jax.numpy.eye(4)
    >>> half(w, w).dtype, jax.grad(half)(w, w).dtype
    (dtype('float32'), dtype('float32'))
    """
    from jaxmp.autocast.transform import transformed  # here, so that `import jaxmp` stays light

    return transformed(fun, policy, overrides)
