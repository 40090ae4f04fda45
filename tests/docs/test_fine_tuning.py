"""The recipes for LoRA and QLoRA run, and their gradients match those in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import published_gpt2
import pytest
from autocast_tools import flat
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from pages import blocks
from places import ROOT
from safetensors.numpy import load_file

import jaxmp
from experiments.models.gpt2 import GPT2
from jaxmp.base.trees import path_name
from jaxmp.training.remat import recompute_layers

pytestmark = [pytest.mark.once, pytest.mark.slow("runs the code of the docs")]

PAGE = ROOT / "docs" / "cookbook" / "lora.md"
LORA = [block for block in blocks(PAGE) if block.needs != "qwix"]
QLORA = [block for block in blocks(PAGE) if block.needs == "qwix"]
TABS = pytest.mark.parametrize("tab", ["Linen", "NNX"])
Scope = dict[str, Any]
SIZES = (
    published_gpt2.VOCABULARY, published_gpt2.CONTEXT, published_gpt2.LAYERS, published_gpt2.WIDTH // 64,
    published_gpt2.WIDTH,
)  # fmt: skip


def relative_error(tree: Any, exact: Any) -> float:
    return float(np.linalg.norm(flat(tree) - flat(exact)) / np.linalg.norm(flat(exact)))


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def drawn(tree: Any) -> Any:
    """Return random values for a tree of adapters."""
    draws = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(draws.normal(size=leaf.shape, scale=0.05), leaf.dtype), tree)


def mean_loss(logits: jax.Array, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@TABS
def test_lora_trains_float32_adapters_of_a_published_model_in_bfloat16(
    tab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    published = published_gpt2.write(tmp_path)
    monkeypatch.setattr(hub, "hf_hub_download", lambda repository, name: str(tmp_path / name))
    scope: Scope = {"__name__": "__main__"}
    *until_trained, save, merge = [block for block in LORA if block.tab == tab]
    with jax.numpy_dtype_promotion("standard"):
        for block in until_trained:
            exec(block.code, scope)

        base, adapters, opt_state = parts(scope, tab)
        assert dtypes(base) == {"bfloat16"} and len(jax.tree.leaves(base)) == len(published)
        assert dtypes(adapters) == {"float32"} and len(pairs(adapters)) == 4 * published_gpt2.LAYERS
        moments = [leaf.shape for leaf in jax.tree.leaves(opt_state) if leaf.ndim]
        assert sorted(moments) == sorted(2 * [leaf.shape for leaf in jax.tree.leaves(adapters)])

        tokens = scope["tokens"]
        exact = jax.jit(
            jax.grad(lambda pairs: mean_loss(float32_logits(pairs, tmp_path, tokens[:, :-1]), tokens[:, 1:]))
        )
        grads = gradients(scope, tab, adapters)
        assert dtypes(grads) == {"float32"}
        assert relative_error(pairs(grads), exact(pairs(adapters))) < 0.03

        before = jax.tree.map(np.asarray, adapters)
        for block in (save, merge):
            exec(block.code, scope)
        restored = scope["restored"]
        restored = restored.params if tab == "Linen" else nnx.as_pure(restored["adapters"])
        assert relative_error(restored, before) == 0
    logits = float32_logits(pairs(before), tmp_path, tokens)
    assert relative_error(scope["before"], logits) < 0.02
    assert relative_error(scope["logits"], logits) < 0.02


class DownAndUp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="down")(nn.Dense(8, name="up")(x))


def adapter_functions(model: nn.Module, shapes: Any) -> Scope:
    """Return the functions of the Linen recipe, for another model with layers called "down" and "up"."""
    [code] = [block.code for block in LORA if "def make_adapters" in block.code]
    scope = {"jax": jax, "jnp": jnp, "nn": nn, "flatten_dict": flatten_dict, "unflatten_dict": unflatten_dict}
    scope |= {"model": model, "shapes": shapes}
    exec(code, scope)
    scope["targets"] = ("down", "up")
    return scope


def test_lora_works_if_layers_are_called_down_and_up() -> None:
    x, model = jnp.ones((2, 4)), DownAndUp()
    base = model.init(jax.random.key(0), x)["params"]
    scope = adapter_functions(model, base)
    adapters = drawn(scope["make_adapters"](jax.random.key(1)))
    merged = {
        name: {**base[name], "kernel": base[name]["kernel"] + pair["lora_a"] @ pair["lora_b"]}
        for name, pair in adapters.items()
    }
    expected = model.apply({"params": merged}, x)
    np.testing.assert_allclose(scope["apply"](base, adapters, x), expected, rtol=1e-5, atol=1e-6)


def test_lora_names_a_layer_that_has_the_name_of_an_adapter() -> None:
    shapes = {"up": {"kernel": jnp.ones((4, 4))}, "lora_a": {"kernel": jnp.ones((4, 4))}}
    scope = adapter_functions(DownAndUp(), shapes)
    with pytest.raises(ValueError, match=r"lora_a/kernel has the name of an adapter"):
        scope["make_adapters"](jax.random.key(0))


def parts(scope: Scope, tab: str) -> tuple[Any, Any, Any]:
    """Return the frozen arrays, the adapters and the optimizer's state."""
    if tab == "Linen":
        return scope["state"].model_state, scope["state"].params, scope["state"].opt_state
    adapters, base = nnx.state(scope["model"], nnx.LoRAParam, ...)
    return nnx.as_pure(base), nnx.as_pure(adapters), nnx.as_pure(scope["optimizer"].opt_state)


def pairs(adapters: Any) -> dict[str, list[jax.Array]]:
    """Return the two matrices of each adapter, by the name of the layer in the file."""
    by_layer: dict[str, list[jax.Array]] = {}
    for path, matrix in jax.tree.leaves_with_path(adapters):  # sorted: "lora_a" comes first
        name = path_name(path[:-1]).replace("/", ".").replace("attn_", "attn.").replace("mlp_", "mlp.")
        by_layer.setdefault(name, []).append(matrix)
    return by_layer


def published_params(folder: Path) -> dict[str, jax.Array]:
    """Return the tensors of a file by the paths that the params of the model have here."""
    shapes = jax.eval_shape(GPT2(*SIZES).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params, tensors = {}, load_file(folder / "model.safetensors")
    for path, shape in flatten_dict(shapes, sep="/").items():
        module, _, leaf = path.rpartition("/")
        name = f"{module.replace('h_', 'h.').replace('/', '.')}.{'bias' if leaf == 'bias' else 'weight'}"
        rows = shape.shape[0] - len(tensors[name])  # the vocabulary is padded
        params[path] = jnp.pad(tensors[name], [(0, rows), *[(0, 0)] * (shape.ndim - 1)])
    return params


def float32_logits(adapters: dict[str, list[jax.Array]], folder: Path, tokens: Any) -> jax.Array:
    """Return GPT-2's float32 logits, with merged adapters and bfloat16 weights."""
    model = GPT2(*SIZES)
    params = {path: leaf.astype(jnp.bfloat16).astype(jnp.float32) for path, leaf in published_params(folder).items()}
    for name, (down, up) in adapters.items():
        path = name.replace("h.", "h_", 1).replace(".", "/") + "/kernel"
        params[path] += jnp.matmul(down, up, precision="highest")
    return model.apply({"params": unflatten_dict(params, sep="/")}, tokens)


def gradients(scope: Scope, tab: str, adapters: Any) -> Any:
    if tab == "Linen":
        gradient = jax.grad(scope["loss_fn"], has_aux=True)
        return jax.jit(gradient)(adapters, scope["state"].model_state, scope["tokens"], None)[0]
    gradient = nnx.grad(scope["loss_fn"], argnums=nnx.DiffState(0, nnx.LoRAParam))
    return nnx.as_pure(nnx.jit(gradient)(scope["model"], scope["tokens"]))


def test_the_table_of_memory_on_the_page_is_right() -> None:
    shapes = jax.eval_shape(GPT2().init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    shapes = {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}
    shapes["wte/embedding"] = (50257, 768)
    count = sum(map(np.prod, shapes.values()))
    rank_8 = sum(8 * sum(shape) for path, shape in shapes.items() if path.endswith("kernel"))
    expected = [
        [4 * count, 4 * count, 8 * count],  # params, gradients, moments
        [2 * count, 4 * rank_8, 4 * rank_8, 8 * rank_8],
    ]
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(("| all params", "| LoRA of"))]
    for row, numbers in zip(rows, expected, strict=True):
        shown = [float(cell) for cell in row.replace(",", "").split("|")[2:] if cell.strip()]
        assert shown == pytest.approx([number / 2**20 for number in (*numbers, sum(numbers))], abs=0.51)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, for qwix
@pytest.mark.parametrize(("tab", "stored"), [("Linen", "uint4"), ("NNX", "int8")])
def test_qlora_trains_float32_adapters_of_a_base_in_four_or_eight_bits(tab: str, stored: str) -> None:
    qwix = pytest.importorskip("qwix")
    [block] = [block for block in QLORA if block.tab == tab]
    nf4, int8 = '"weight_qtype": "nf4", "tile_size": 64', '"weight_qtype": "int8"'
    assert nf4 in block.code
    scope: Scope = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        exec(block.code if stored == "uint4" else block.code.replace(nf4, int8), scope)
        assert float(scope["metrics"]["loss"]) < 0.01
        if tab == "Linen":
            check_linen_qlora(scope, stored, qwix)
        else:
            check_nnx_qlora(scope, stored)


def check_linen_qlora(scope: Scope, stored: str, qwix: Any) -> None:
    batch, state = scope["batch"], scope["state"]
    base, adapters = state.model_state, drawn(state.params)
    kernels = {path: leaf.array for path, leaf in base.items() if hasattr(leaf, "how")}
    assert len(kernels) == 4 and {array.qvalue.dtype.name for array in kernels.values()} == {stored}
    assert dtypes(state.params) == {"float32"} and len(adapters) == 8
    assert sum(leaf.ndim > 0 for leaf in jax.tree.leaves(state.opt_state)) == 2 * len(adapters)

    def float32_loss(adapters: Any) -> jax.Array:
        merged = dict(base)
        for path, array in kernels.items():
            down, up = (adapters[*path[:-1], f"kernel_lora_{name}"] for name in "ab")
            merged[path] = qwix.dequantize(array) + 2 * jnp.matmul(down, up, precision="highest")  # alpha / rank
        return mean_loss(scope["Net"]().apply({"params": unflatten_dict(merged)}, batch["x"]), batch["y"])

    exact = jax.jit(jax.grad(float32_loss))(adapters)

    def loss_under(model: Any) -> Callable[[Any], jax.Array]:
        def loss(adapters: Any) -> jax.Array:
            return mean_loss(model.apply({"params": unflatten_dict({**adapters, **base})}, batch["x"]), batch["y"])

        return loss

    with_policy = jaxmp.linen.apply_policy(scope["Net"](), "mixed_bfloat16")
    other_order = qwix.apply_lora_to_model(with_policy, qwix.LoraProvider([scope["rule"]]))
    for model in (scope["model"], other_order):
        grads = jax.jit(jax.grad(loss_under(model)))(adapters)
        assert dtypes(grads) == {"float32"} and 0 < relative_error(grads, exact) < 0.02
        assert not stored_kernels(recompute_layers(loss_under(model)), adapters)
    assert stored_kernels(loss_under(scope["model"]), adapters)


def stored_kernels(loss: Any, adapters: Any) -> list[jax.Array]:
    """Return the dequantised kernels that are stored for the backward pass."""
    residuals = jax.tree.leaves(jax.vjp(loss, adapters)[1])
    return [leaf for leaf in residuals if leaf.dtype == jnp.bfloat16 and leaf.size == 64 * 256]


def check_nnx_qlora(scope: Scope, stored: str) -> None:
    batch, model = scope["batch"], scope["model"]
    adapters, base = nnx.state(model, nnx.LoRAParam, ...)
    assert dtypes(adapters) == {"float32"} and len(jax.tree.leaves(adapters)) == 8
    assert sum(leaf.dtype.name == stored for leaf in jax.tree.leaves(base)) == 4
    nnx.update(model, drawn(adapters))  # `net` shares these Variables
    gradient = nnx.jit(nnx.grad(scope["loss_fn"], argnums=nnx.DiffState(0, nnx.LoRAParam)))
    exact, grads = gradient(scope["net"], batch), gradient(model, batch)
    assert dtypes(grads) == {"float32"} and 0 < relative_error(grads, exact) < 0.03
