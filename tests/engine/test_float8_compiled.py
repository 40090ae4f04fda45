"""Float8 products compiled for an absent H200: their kernels, and XLA's pitfalls."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Float8
from jaxmp.inspect.compiled import compiling, targets
from jaxmp.inspect.compiled.hlo import NO_KERNEL, HloProgram, is_end
from jaxmp.policy import float8_product
from jaxmp.sharding import Sharding
from jaxmp.training import remat

RECIPE = Float8()
pytestmark = pytest.mark.absent_gpu
T, K, N = 4096, 2048, 8192


def dot(x, w, recipe=RECIPE, dimensions=(((1,), (0,)), ((), ()))):
    return float8_product.dot_general(x, w, dimensions, recipe)


def given_gradient(params, model_state, batch, rng):
    """Return a loss whose gradient with respect to the product is ``batch["g"]``."""
    return jnp.sum((batch["x"] @ params["w"].T).astype(jnp.float32) * batch["g"]), model_state


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def program(fun, *args):
    return HloProgram(compiling.compiled(jax.jit(fun), args, "h200").as_text())


def calls(program):
    """Count a program's float8 matrix products, and all its matrix products."""
    texts = [
        step.text
        for _, step, _ in program.instructions_by_run(into_fusions=True)
        if step.opcode in ("custom-call", "dot")
    ]
    matches = [re.search(r'custom_call_target="([^"]*)"', text) for text in texts]
    names = [match[1] if match else "dot" for match in matches]
    return sum(name.endswith("matmul$f8") for name in names), sum(
        "matmul" in n or "gemm" in n or n == "dot" for n in names
    )


def kernels(program):
    return sum(
        step.opcode not in NO_KERNEL and not is_end(step.opcode)
        for _, step, _ in program.instructions_by_run(into_fusions=False)
    )


def both_gradients(x, w, g, recipe=RECIPE):
    y, pull = jax.vjp(functools.partial(dot, recipe=recipe), x, w)
    return y, pull(g)


class TestForAnH200:
    @pytest.mark.parametrize("recipe", [RECIPE, Float8(accumulate="fast", gradient="e4m3")], ids=str)
    def test_a_product_with_its_gradients_is_three_float8_calls_and_at_most_16_kernels(self, recipe):
        hlo_program = program(functools.partial(both_gradients, recipe=recipe), shape(T, K), shape(K, N), shape(T, N))
        assert calls(hlo_program) == (3, 3)
        assert kernels(hlo_program) <= 16

    def test_three_dimensions_and_transposed_weights_are_float8(self):
        def turned(x, w, g):
            y, pull = jax.vjp(functools.partial(dot, dimensions=(((2,), (1,)), ((), ()))), x, w)
            return y, pull(g)

        assert calls(program(turned, shape(4, T // 4, K), shape(N, K), shape(4, T // 4, N))) == (3, 3)

    @pytest.mark.parametrize("order", ["vmap(grad)", "grad(vmap)"])
    def test_all_products_are_float8_under_vmap(self, order):
        def of_each(x, g):
            return lambda w: jnp.sum((dot(x, w) * g).astype(jnp.float32))

        if order == "vmap(grad)":
            fun = lambda x, w, g: jax.vmap(lambda x, g: jax.grad(of_each(x, g))(w))(x, g)  # noqa: E731
        else:
            fun = lambda x, w, g: jax.grad(lambda w: jax.vmap(lambda x, g: of_each(x, g)(w))(x, g).sum())(w)  # noqa: E731
        in_float8, in_all = calls(program(fun, shape(4, 1024, K), shape(K, N), shape(4, 1024, N)))
        assert in_float8 == in_all >= 1

    def test_on_a_mesh_float8_products_give_float32_gradients(self):
        mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
        specs, policy = {"w": P("fsdp")}, "compute=bfloat16,output=float32,float8(min_dim=256,min_tokens=256)"
        tx = jaxmp.loss_scaling(optax.sgd(1.0), jaxmp.NoOpLossScale())

        def placed(leaf):
            spec = P("fsdp") if leaf.ndim else P()
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        params = {"w": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
        state = jax.tree.map(placed, jax.eval_shape(lambda w: jaxmp.TrainState.create(params=w, tx=tx), params))
        batch = {"x": placed(jax.ShapeDtypeStruct((4096, 256), jnp.float32)),
                 "g": placed(jax.ShapeDtypeStruct((4096, 512), jnp.float32))}  # fmt: skip
        step = jaxmp.make_train_step(given_gradient, policy=policy, sharding=Sharding(mesh, specs))
        executable = compiling.compiled(step, (state, batch), "h200")
        assert calls(HloProgram(executable.as_text())) == (2, 2)
        rows = jaxmp.inspect.collectives(executable).rows
        assert [row.dtype for row in rows if row.kind == "reduce-scatter"] == ["float32"]
        assert [row.dtype for row in rows if row.kind == "all-gather"] == ["bfloat16"]

    def test_a_gelu_under_scan_compiles(self):
        """XLA must not fuse this GELU into a float8 product, which would crash it.

        The backward pass saves only the input of the GELU, so XLA would use the epilogue ``GELU_AUX``.
        """

        @jax.custom_vjp
        def gelu(x):
            return jax.nn.gelu(x)

        gelu.defvjp(lambda x: (gelu(x), x), lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g))

        def loss(x, up, down):
            def layer(x, w):
                return x + dot(gelu(dot(x, w[0])), w[1]), None

            return jnp.sum(jax.lax.scan(layer, x, (up, down))[0].astype(jnp.float32))

        hlo_program = program(jax.grad(loss, (0, 1, 2)), shape(2048, 1024), shape(3, 1024, 4096), shape(3, 4096, 1024))
        in_float8, in_all = calls(hlo_program)
        assert in_float8 == in_all >= 6

    def test_the_scale_that_dequantises_is_the_one_that_quantised(self):
        """XLA does not round the scale to bfloat16 with an error of up to 0.4 %.

        It would do so without excess precision if the scale were not a bfloat16 number already.
        """
        lowered = jax.jit(dot).trace(
            *targets.on(targets.device_of(targets.TARGETS["h200"].text()), (shape(T, K), shape(K, N)))
        )
        options = {**targets.COMPILER_OPTIONS, "xla_allow_excess_precision": False}
        text = lowered.lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()
        assert calls(HloProgram(text)) == (1, 1)
        # These constants round the scales up to bfloat16 numbers, so casts to bfloat16 change no bit of them.
        assert "65520" in text and "4294901760" in text

    def test_all_residuals_of_a_scan_are_float8(self):
        def loss(x, ws):
            return jnp.sum(jax.lax.scan(lambda x, w: (dot(x, w), None), x, ws)[0].astype(jnp.float32))

        args = shape(2048, 1024), shape(3, 1024, 1024)
        for fun in (loss, jax.checkpoint(loss, policy=remat.REMAT["float8"])):
            text = compiling.compiled(jax.jit(jax.grad(fun, (0, 1))), args, "h200").as_text()
            stacked = set(re.findall(r"(\w+)\[3,2048,1024\]", text))
            assert stacked and stacked <= {"f8e4m3fn", "u8"}
