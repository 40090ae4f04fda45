"""Each primitive of the installed JAX has exactly one class in the table."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections import Counter
from fnmatch import filter as filter_names

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.ode import odeint
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from primitive_tools import SKIPPED, installed_primitives

from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import (
    COMBINES,
    MONOTONE,
    Class,
    Trait,
    _rows,
    classify,
    has_trait,
    of_class,
    with_trait,
)
from jaxmp.program.walk import equations, jaxprs_in

ALL = frozenset().union(*map(of_class, Class))
PATTERNS = {name for name in ALL if "*" in name}
X = jax.ShapeDtypeStruct((4, 4), "float32")
V = jax.ShapeDtypeStruct((4,), "float32")
Z = jax.ShapeDtypeStruct((4, 4), "complex64")
IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 3), "float32")
KERNEL = jax.ShapeDtypeStruct((3, 3, 3, 4), "float32")
HEADS = jax.ShapeDtypeStruct((2, 4, 2, 8), "float32")
GROUPS = jax.ShapeDtypeStruct((2,), "int32")
WITH_BODY = (Class.RECURSE, Class.OPAQUE, Class.LINALG)
KEY = jax.eval_shape(jax.random.key, 0)

# The first version of JAX that has a primitive, and the first version that no longer has it. All versions from 0.10 to
# 0.12 have the primitives that are not listed here.
_ARRIVALS = {
    "0.10.1": "stack stage unstack",
    "0.10.2": "mulhi philox*x32",
    "0.11.1": "relayout unreduced_pmax unreduced_pmin",
    "0.11.2": "log2 one_minus_square program_order",
    "0.12.0": "pbroadcast_dynamic polynomial reduced_vary_cast vary_unreduced_cast thunky.*",
}
_DEPARTURES = {
    "0.11.1": "call closed_call core_map fusible box_* new_box new_log log_extend log_read",
    "0.11.2": "shard_alike",
    "0.12.0": "reduced_vary_cast_p vary_unreduced_cast_p",
}
SINCE = {name: version for version, names in _ARRIVALS.items() for name in names.split()}
UNTIL = {name: version for version, names in _DEPARTURES.items() for name in names.split()}


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_primitive_of_the_installed_jax_has_a_class():
    unknown = {name: module for name, module in installed_primitives().items() if classify(name) is None}
    assert not unknown, (
        f"JAX {jax.__version__} has primitives without a class in jaxmp/program/primitives.py: {unknown}"
    )


def test_the_table_names_no_primitive_twice_and_has_all_primitives_with_versions():
    counts = Counter(name for name, _, _ in _rows())
    assert [name for name, count in counts.items() if count > 1] == []
    assert (SINCE.keys() | UNTIL.keys()) <= ALL


def test_the_table_names_only_primitives_of_this_jax_or_gives_their_versions():
    def is_expected(name):
        since, until = (_version(bounds.get(name)) for bounds in (SINCE, UNTIL))
        return (since or (0,)) <= jax.__version_info__ and (until is None or jax.__version_info__ < until)

    installed = {
        *installed_primitives(),
        "cast_repeated",
        "separate_cast",
        *(pattern for pattern in PATTERNS if filter_names(installed_primitives(), pattern)),
    }
    assert {name for name in ALL if is_expected(name)} - installed == set(), "not in this JAX"
    assert {name for name in ALL if not is_expected(name)} & installed == set(), "SINCE or UNTIL"


def test_only_opaque_primitives_have_patterns():
    assert of_class(Class.OPAQUE) >= PATTERNS
    assert all(len(pattern.replace("*", "")) > 3 for pattern in PATTERNS)
    assert classify("scan") is classify("custom_jvp_call") is Class.RECURSE  # a name wins over a pattern
    assert classify("random_of_tomorrow") is Class.OPAQUE and classify("a_random_one") is None
    assert classify("someone_elses_primitive") is None


def test_each_trait_has_a_definition_and_at_least_two_primitives():
    definitions = ast.parse(inspect.getsource(Trait)).body[0].body
    traits = [node.targets[0].id for node in definitions if isinstance(node, ast.Assign)]
    after = dict(itertools.pairwise(definitions))
    assert traits == [trait.name for trait in Trait]
    for node in definitions:
        if isinstance(node, ast.Assign):
            assert isinstance(after[node].value, ast.Constant), f"{node.targets[0].id} has no docstring"
    assert {trait.name: with_trait(trait) for trait in Trait if len(with_trait(trait)) < 2} == {}


def test_a_name_has_the_traits_of_its_pattern():
    assert has_trait("scaled_matmul_wrapper", Trait.UNCOUNTED)
    assert not has_trait("someone_elses_primitive", Trait.UNCOUNTED)


def test_moves_do_not_sum_cotangents_in_their_gradients():
    assert with_trait(Trait.PERMUTES).isdisjoint(with_trait(Trait.REPEATS, Trait.LOOKS_UP, Trait.BROADCASTS))
    assert MONOTONE.isdisjoint(with_trait(Trait.REPEATS, Trait.LOOKS_UP, Trait.BROADCASTS))


def _version(text):
    return text and tuple(map(int, text.split(".")))


# -- how the primitives are found ------------------------------------------------------------------------------------


def test_unpublished_primitives_are_found_too():
    names = {value.name for value in vars(jax.extend.core.primitives).values() if isinstance(value, Primitive)}
    assert len(names) > 100
    assert names <= set(installed_primitives())
    assert {"ragged_dot_general", "scatter-sub", "optimization_barrier", "shard_map", "pallas_call", "ffi_call"} <= set(
        installed_primitives()
    )


def test_a_new_primitive_in_any_module_of_jax_is_found(monkeypatch):
    monkeypatch.setattr(jax.experimental.ode, "new_p", Primitive("brand_new"), raising=False)
    assert installed_primitives.__wrapped__()["brand_new"] == "jax.experimental.ode"


def test_skipped_modules_exist_and_have_a_reason():
    for prefix, why in SKIPPED.items():
        package = importlib.import_module(prefix.rpartition(".")[0])
        children = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        assert any(child.name.startswith(prefix) for child in children)
        assert why


# -- the primitives of programs --------------------------------------------------------------------------------------


@jax.custom_jvp
def jvp_by_hand(x):
    return jnp.sin(x)


jvp_by_hand.defjvp(lambda primals, tangents: (jvp_by_hand(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def vjp_by_hand(x):
    return jnp.sin(x)


vjp_by_hand.defvjp(lambda x: (vjp_by_hand(x), x), lambda x, ct: (jnp.cos(x) * ct,))


@jax.custom_batching.custom_vmap
def vmap_by_hand(x):
    return jnp.sin(x)


vmap_by_hand.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def scan(x):
    return jax.lax.scan(lambda carry, row: (jnp.tanh(carry @ x + row), carry.sum()), x[0], x)


def over_devices(x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        return jax.lax.psum(jax.lax.all_gather(x, "i") @ jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]).T, "i")

    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)(x)


def with_reference(x):
    ref = jax.new_ref(x)
    ref[0] += 1.0
    return ref[...]


def callbacks(x):
    jax.debug.print("{}", x)
    return jax.pure_callback(lambda x: x, X, x)


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def mean_pool(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def total(fun):
    return lambda *args: sum(leaf.sum() for leaf in jax.tree.leaves(fun(*args)))


# Each of these programs has a primitive that no other program has.
PROGRAMS = {
    "gradient of a convolution": (jax.grad(total(conv), (0, 1)), (IMAGES, KERNEL)),
    "gradient of max pooling": (jax.grad(total(pool)), (IMAGES,)),
    "max pooling, forward derivative": (lambda x: jax.jvp(pool, (x,), (x,)), (IMAGES,)),
    "mean pooling": (mean_pool, (IMAGES,)),
    "attention": (lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), (HEADS,)),
    "updates by index": (lambda x: x.at[0].set(1).at[1].add(2).at[2].mul(3).at[3].min(4), (V,)),
    "slices": (lambda x: jax.lax.dynamic_update_slice(x, x[1:, 2:], (0, 1)), (X,)),
    "stacking": (lambda x: jnp.stack([x, jnp.flip(x)]) + jnp.pad(x, 2)[:4, :4], (X,)),
    "sorting": (lambda x: (jnp.sort(x), jnp.argsort(x), jax.lax.top_k(x, 2), jnp.median(x)), (X,)),
    "cumulative": (lambda x: (jnp.cumsum(x), jnp.cumprod(x), jax.lax.cumlogsumexp(x)), (X,)),
    "special": (
        lambda x: (jax.scipy.special.gammaln(x), jax.scipy.special.betainc(x, x, x), jax.scipy.special.i0(x)),
        (X,),
    ),
    "solve": (lambda x: jnp.linalg.solve(x, x), (X,)),
    "factorisations": (
        lambda x: (jnp.linalg.qr(x), jnp.linalg.eigh(x), jnp.linalg.svd(x), jnp.linalg.cholesky(x), jnp.linalg.eig(x)),
        (X,),
    ),
    "schur": (jax.scipy.linalg.schur, (X,)),
    "Fourier": (lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)), (X,)),
    "complex": (lambda z: (z.real, z.imag, jnp.abs(z), jnp.conj(z), jax.lax.complex(z.real, z.imag)), (Z,)),
    "gradient of a scan": (jax.grad(total(scan)), (X,)),
    "while": (lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x), (X,)),
    "switch": (lambda x: jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], x), (X,)),
    "checkpoint": (jax.grad(total(jax.checkpoint(lambda x: jnp.tanh(x @ x)))), (X,)),
    "checkpoint_name": (lambda x: checkpoint_name(x, "x"), (X,)),
    "custom_jvp": (jvp_by_hand, (X,)),
    "custom_vjp": (vjp_by_hand, (X,)),
    "custom_vmap": (vmap_by_hand, (X,)),
    "jit": (jax.jit(jnp.sin), (X,)),
    "shard_map": (over_devices, (X,)),
    "sharding": (lambda x: jax.device_put(x, jax.devices()[0]), (X,)),
    "random": (
        lambda key: (jax.random.normal(key), jax.random.gamma(key, 2.0), jax.random.permutation(key, 4)),
        (KEY,),
    ),
    "keys": (lambda key: jax.random.split(jax.random.fold_in(key, 1)), (KEY,)),
    "old keys": (lambda i: jax.random.uniform(jax.random.PRNGKey(i)), (0,)),
    "bits": (lambda x: jax.lax.bitcast_convert_type(x, "int32") >> 3, (X,)),
    "precision": (lambda x: jax.lax.reduce_precision(x, 5, 10), (X,)),
    "callbacks": (callbacks, (X,)),
    "references": (with_reference, (X,)),
    "barrier": (jax.lax.optimization_barrier, (X,)),
    "reduce": (lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)), (X,)),
    "ragged": (jax.lax.ragged_dot, (X, jax.ShapeDtypeStruct((2, 4, 4), "float32"), GROUPS)),
    "polynomial": (lambda x: jnp.polyval(jnp.arange(4.0), x), (X,)),
    "ode": (lambda x: odeint(lambda y, t: -y, x, jnp.arange(3.0)), (V,)),
}


@pytest.fixture(scope="module")
def traced():
    """Return all equations of each program."""
    return {name: list(equations(jax.make_jaxpr(fun)(*args))) for name, (fun, args) in PROGRAMS.items()}


def test_programs_contain_only_primitives_that_have_a_class(traced):
    primitives = {name: {primitive_of(eqn) for eqn in eqns} for name, eqns in traced.items()}
    unclassified = {}
    for name, names in primitives.items():
        if unknown := {primitive for primitive in names if classify(primitive) is None}:
            unclassified[name] = unknown
    assert unclassified == {}
    for name, expected in {
        "gradient of max pooling": "select_and_scatter_add", "factorisations": "eigh", "custom_vjp": "custom_vjp_call",
        "gradient of a scan": "add_any", "shard_map": "psum", "random": "random_gamma", "ragged": "ragged_dot_general",
    }.items():  # fmt: skip
        assert expected in primitives[name]  # the program contains what its name says


# -- numerics behind the table ---------------------------------------------------------------------------------------


def test_primitives_with_a_body_are_recurse_opaque_or_linalg(traced):
    bodies = set()
    for eqn in (eqn for eqns in traced.values() for eqn in eqns):
        if any(jaxprs_in(eqn)):
            bodies.add(primitive_of(eqn))
    assert {"scan", "while", "cond", "jit", "shard_map", "custom_jvp_call"} <= bodies
    # The body of a scatter is one operation, which the name of the scatter tells.
    scatters = {name for name in bodies if name.startswith("scatter")}
    assert {name: classify(name) for name in bodies - scatters if classify(name) not in WITH_BODY} == {}


def amplifications(names):
    """Return for each function the error of its result for a relative error of its argument.

    The error is relative to the result, or to 1 if the result is smaller.
    """

    def amplification(fun, x):
        slope = jax.vmap(jax.grad(fun))(x)
        return jnp.max(jnp.abs(x * slope) / jnp.maximum(jnp.abs(fun(x)), 1))

    x = np.logspace(-6.0, 1.9, 2000, dtype=np.float32)
    errors = jax.jit(lambda x: {name: amplification(getattr(jax.lax, name), x) for name in names})(x)
    return {name: float(error) for name, error in errors.items()}


@pytest.mark.once
def test_infer_primitives_hardly_amplify_rounding():
    unary = [name for name in of_class(Class.INFER) - {"integer_pow"} if hasattr(jax.lax, name)]
    assert {"tanh", "logistic", "erfc"} <= set(unary)
    assert {name: error for name, error in amplifications(unary).items() if not error <= 4} == {}


def test_primitives_that_amplify_rounding_are_float32():
    for name, error in amplifications(["exp", "exp2", "expm1", "sinh", "cosh", "tan", "sin", "cos"]).items():
        assert error > 8, name
        assert classify(name) is Class.POINTWISE, name


@pytest.mark.once
def test_long_half_accumulations_are_wrong():
    combines = {"cumsum": jnp.add, "cumprod": jnp.multiply, "cumlogsumexp": jnp.logaddexp}
    for name, combine in combines.items():
        x = jnp.full((4096,), 1.001 if name == "cumprod" else 1.0)
        # A scan adds one term after another, as scatters and gradients do. JAX's own sums on a CPU are pairwise.
        half = jax.lax.scan(lambda c, v, f=combine: (f(c, v), None), x[0].astype("bfloat16"), x[1:].astype("bfloat16"))
        right = getattr(jax.lax, name)(x)[-1]
        assert abs(float(half[0]) - right) > 0.3 * right, name
        assert classify(name) is Class.ACCUMULATION, name


def test_sets_of_primitives_are_subsets_of_their_classes():
    assert of_class(Class.CLEAR) | {"convert_element_type"} >= MONOTONE
    # An accumulation only in its derivative, which counts equal updates.
    assert of_class(Class.WIDEST) | {"scatter-min", "scatter-max"} >= COMBINES
