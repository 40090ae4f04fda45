"""The columns of the projects, in the table of recipes of other projects, have the dtypes of the programs below it."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from pages import Block, blocks
from places import ROOT

import jaxmp
from jaxmp.base.trees import path_name
from jaxmp.program.walk import equations

pytestmark = [
    pytest.mark.once,
    pytest.mark.slow("runs the code of the docs"),
    pytest.mark.usefixtures("standard_promotion"),
]

PAGE = ROOT / "docs" / "cookbook" / "recipes_of_others.md"
PROJECTS = ("MaxText", "torchtitan", "levanter", "modded-nanogpt")
Dtypes = list[str]


def read_table(page: Path) -> dict[str, dict[str, Dtypes]]:
    """Return the dtypes that each cell of the first table names, by row and by project."""
    first_section = page.read_text().partition("\n## ")[0]
    lines = [line for line in first_section.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header[1:-1] == list(PROJECTS)
    return {
        row[0]: {
            project: re.findall(r"float32|bfloat16|float8", cell)
            for project, cell in zip(PROJECTS, row[1:-1], strict=True)
        }
        for row in rows
    }


def section_of(block: Block) -> str:
    """Return the last heading before a block of the page."""
    before = PAGE.read_text().splitlines()[: block.line]
    return [line for line in before if line.startswith("## ")][-1].removeprefix("## ")


def run_blocks(sections: tuple[str, ...], tab: str, scope: dict[str, Any]) -> None:
    """Run the blocks of these sections in a scope of variables."""
    for block in blocks(PAGE):
        if block.tab == tab and section_of(block) in sections:
            exec(compile(block.code, f"{PAGE.name}, line {block.line}", "exec"), scope)


class Recipe:
    """The program of a project.

    Attributes:
      scope: the variables of the blocks.
      tx, reduce_dtype: the arguments of the page's ``make_step``.
    """

    def __init__(self, project: str, tab: str) -> None:
        self.scope: dict[str, Any] = {"__name__": "__main__"}
        run_blocks(("The decoder",), tab, self.scope)
        self.make_step = self.scope["make_step"]
        self.scope["make_step"] = self._made
        run_blocks((project,), tab, self.scope)
        state = self.scope["state" if tab == "Linen" else "optimizer"]
        self.equations = list(equations(self._traced(state, self.scope["step"])))

    def _made(self, model: Any, tx: Any, reduce_dtype: str) -> Any:
        self.tx, self.reduce_dtype = tx, reduce_dtype
        return self.make_step(model, tx, reduce_dtype)

    def _traced(self, state: Any, step: Any) -> Any:
        """Return the program of a step.

        ``state`` is the first result of ``make_step``: a train state in Linen, an optimizer in NNX.
        """
        batch = self.scope["batch"]
        if isinstance(state, jaxmp.TrainState):
            return jax.make_jaxpr(step)(state, batch)
        pair = self.scope["model"], state
        return jax.make_jaxpr(lambda batch: step(*nnx.clone(pair), batch))(batch)

    @property
    def params(self) -> Any:
        if "state" in self.scope:
            return self.scope["state"].params
        return nnx.as_pure(nnx.state(self.scope["model"], nnx.Param))

    def results(self, scope: str, primitive: str) -> set[str]:
        """Return the dtypes of an operation's results in a scope of the forward pass.

        ``scope`` is a regular expression. It must match the scope of at least one result.
        """
        dtypes = set(self._results(scope, primitive))
        assert dtypes, f"no {primitive} in a scope {scope}"
        return dtypes

    def _results(self, scope: str, primitive: str) -> Iterator[str]:
        for eqn in self.equations:
            names = re.split(r"[/()]", str(eqn.source_info.name_stack))
            in_scope = any(re.fullmatch(scope, name) for name in names)
            if eqn.primitive.name == primitive and in_scope and "transpose" not in names:
                yield eqn.outvars[0].aval.dtype.name

    def all_results(self, *primitives: str) -> set[str]:
        """Return the dtypes of the results of all equations with these primitives. There must be one."""
        found = [eqn for eqn in self.equations if eqn.primitive.name in primitives]
        assert found, f"no {primitives}"
        return {var.aval.dtype.name for eqn in found for var in eqn.outvars}

    def norms_softmax_and_loss(self) -> set[str]:
        norms, loss = self.all_results("rsqrt"), self.all_results("log")
        return norms | loss | self.results(r"attention(_\d)?", "exp")

    def logits(self) -> jax.ShapeDtypeStruct:
        """Return the result of the model."""
        model, tokens = self.scope["model"], self.scope["batch"]["x"]
        if "state" in self.scope:
            return jax.eval_shape(model.apply, {"params": self.params}, tokens)
        return jax.eval_shape(model, tokens)

    def moments(self) -> set[str]:
        state = jax.eval_shape(self.tx.init, self.params)
        trees = [tree for name in ("mu", "nu") for _, tree in optax.tree_utils.tree_get_all_with_path(state, name)]
        return {leaf.dtype.name for leaf in jax.tree.leaves(trees)}

    def compensated(self) -> set[str]:
        """Return the paths of params whose rounding errors are stored."""
        state = jax.eval_shape(self.tx.init, self.params)
        return {path_name(path) for path, _ in jax.tree.leaves_with_path(state.compensation)}

    def gradients(self) -> set[str]:
        """Return the dtypes of the gradients of matrices, as the optimizer gets them."""
        dtypes = set[str]()

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            dtypes.update(leaf.dtype.name for leaf in jax.tree.leaves(grads) if leaf.ndim > 1)
            return jax.tree.map(jnp.zeros_like, grads), state

        recorder = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # half params lose small updates
            self._traced(*self.make_step(self.scope["model"], recorder, self.reduce_dtype))
        return dtypes

    def products_of_update(self) -> set[str]:
        """Return the dtypes of the operands of the optimizer's products."""
        state = jax.eval_shape(self.tx.init, self.params)
        grads = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype), self.params)
        program = jax.make_jaxpr(self.tx.update)(grads, state, grads)
        products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        return {atom.aval.dtype.name for eqn in products for atom in eqn.invars}

    def measured(self) -> dict[str, set[str]]:
        """Return the dtypes that each row of the table names."""
        return {
            "params": {leaf.dtype.name for leaf in jax.tree.leaves(self.params) if leaf.ndim > 1},
            "activations, residual stream": self.results("residual", "add"),
            "norms, attention's softmax, loss": self.norms_softmax_and_loss(),
            "sines and cosines of rotary tables": self.all_results("sin") | self.all_results("cos"),
            "rotation of queries and keys": self.results("rotation", "mul") | self.results("rotation", "add"),
            "router's product": self.results("gate", "dot_general"),
            "router's softmax": self.results("softmax", "exp") | self.results("softmax", "div"),
            "experts' outputs times their weights": self.results("combine", "mul"),
            "sum over experts": self.results("combine", "reduce_sum"),
            "logits": self.results("head", "dot_general") | {self.logits().dtype.name},
            "moments": self.moments(),
            "products of Muon's iteration": self.products_of_update(),
            "sum of gradients over devices": self.all_results("reduce_scatter", "psum", "psum_invariant"),
            "gradients in the optimizer's update": self.gradients(),
        }


recipe_of = functools.cache(Recipe)
BOTH = pytest.mark.parametrize("tab", ["Linen", "NNX"])


@BOTH
@pytest.mark.parametrize("project", PROJECTS)
def test_the_programs_have_the_dtypes_of_the_table(project: str, tab: str) -> None:
    measured, table = recipe_of(project, tab).measured(), read_table(PAGE)
    assert list(measured) == list(table)
    for row, dtypes in measured.items():
        expected = set(table[row][project])
        # modded-nanogpt has no router, and the other projects no Muon. The last test has float8 logits.
        if expected and "float8" not in expected:
            assert dtypes == expected, row


@BOTH
def test_modded_nanogpts_bfloat16_params_have_more_bits(tab: str) -> None:
    recipe = recipe_of("modded-nanogpt", tab)
    leaves = jax.tree.leaves_with_path(recipe.params)
    halves = {path_name(path) for path, leaf in leaves if leaf.dtype == jnp.bfloat16}
    assert recipe.compensated() == halves and len(halves) > 2


@BOTH
def test_the_share_of_tokens_that_use_another_expert_is_printed(tab: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    run_blocks(("The decoder", "Experts of your own"), tab, scope)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(re.fullmatch(r"\d\.\d% of the tokens use another expert", line) for line in lines)
    chosen_experts, trainer, server = (scope[name] for name in ("chosen_experts", "trainer", "server"))
    # Among the page's 128 tokens, the NNX model has none that changes its experts.
    scope["batch"] = {"x": np.random.default_rng(1).integers(0, scope["VOCABULARY"], (128, 16))}
    for layer in chosen_experts(trainer):
        assert layer.shape == (128, 16, 2) and (layer[..., 0] < layer[..., 1]).all()
        assert len(set(layer.ravel().tolist())) > 2
    shares = shares_of_other_experts(chosen_experts(trainer), chosen_experts(server))
    assert min(shares) > 0 and max(shares) < 0.05
    levels = scope["Levels"]()
    if tab == "Linen":
        equal = jaxmp.linen.apply_policy(scope["Decoder"](levels), "mixed_bfloat16")
    else:
        equal = jaxmp.nnx.apply_policy(scope["Decoder"](levels, nnx.Rngs(0)), "mixed_bfloat16")
    assert shares_of_other_experts(chosen_experts(trainer), chosen_experts(equal)) == [0, 0]


def shares_of_other_experts(chosen: list[Any], other: list[Any]) -> list[float]:
    """Return the share of tokens that use another expert, for each layer."""
    return [float((layer != of_other).any(-1).mean()) for layer, of_other in zip(chosen, other, strict=True)]


def test_the_head_of_modded_nanogpt_is_float8_on_a_gpu_with_float8_products() -> None:
    override = re.search(r'`\{"head": "([^"]*float8[^"]*)"\}`', PAGE.read_text())
    assert override and read_table(PAGE)["logits"]["modded-nanogpt"] == ["float8", "bfloat16"]
    policy = jaxmp.get_policy(override[1])
    weight = jax.ShapeDtypeStruct((768, 50304), "bfloat16")
    x = jax.ShapeDtypeStruct((2048, 768), "float32")
    with jaxmp.hardware.assumed("h200"):
        rows = jaxmp.cast_plan(jnp.matmul, policy)(x, weight).rows
    products = [(row.operands, row.result) for row in rows if row.primitive == "dot_general"]
    assert products == [(("float8_e4m3fn", "float8_e4m3fn"), "bfloat16")]


def test_a_residual_stream_of_experts_only_is_half_in_a_region() -> None:
    def loss(params: Any, x: jax.Array, region: Any) -> jax.Array:
        for _ in range(2):
            y = jax.nn.standardize(x)
            weights = jax.nn.softmax(y @ params["gate"])
            outputs = jnp.einsum("td,edh->teh", y, params["experts"])
            y = jnp.einsum("teh,te->th", outputs, weights)
            with jax.named_scope("residual"), region():
                x = x + y
        return jnp.sum(jax.nn.standardize(x) @ params["head"])

    shapes = {"gate": (32, 8), "experts": (8, 32, 32), "head": (32, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((16, 32), "float32")

    def dtypes(region: Any, primitive: str, scope: str) -> set[str]:
        rows = jaxmp.cast_plan(lambda params, x: loss(params, x, region), "mixed_bfloat16")(params, x).rows
        return {row.result for row in rows if row.primitive == primitive and row.path.endswith(scope)}

    def in_half() -> Any:
        return jaxmp.precision("half")

    assert dtypes(contextlib.nullcontext, "add", "residual") == {"float32"}
    assert dtypes(in_half, "add", "residual") == {"bfloat16"}
    assert dtypes(in_half, "dot_general", "teh,te->th") == {"float32"}


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float32"])
def test_a_ragged_product_on_a_mesh_needs_a_sum_in_half(reduce_dtype: str) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.ragged_dot(x, params["experts"], jnp.array([32, 32])) ** 2)

    sharding = jaxmp.sharding.Sharding(mesh, reduce_dtype=reduce_dtype)
    step = jaxmp.make_train_step(loss, policy="mixed_bfloat16", sharding=sharding)
    state = jaxmp.TrainState.create(params={"experts": jnp.ones((2, 32, 32))}, tx=optax.sgd(0.1))
    refused = pytest.raises(ValueError, match=r"pass Sharding\(…, reduce_dtype='bfloat16'\)")
    with jax.set_mesh(mesh), refused if reduce_dtype == "float32" else contextlib.nullcontext():
        jax.make_jaxpr(step.update)(state, jnp.ones((64, 32)))
