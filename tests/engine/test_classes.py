"""Each primitive that a program of the installed JAX can hold has one class, and the table names no other."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from fnmatch import filter as filter_names
from functools import partial

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

from jaxmp._internals.jax.primitives import COMBINES, MONOTONE
from jaxmp._internals.jax.sources import names_of
from jaxmp._internals.jax.walk import equations, jaxprs_in
from jaxmp.engine import classes
from jaxmp.engine.classes import Class, classify, primitives_of
from jaxmp.engine.marks import SPECIAL
from jaxmp.engine.overrides import UnknownOperationError, primitives_named_by
from jaxmp.engine.rules import Rules
from jaxmp.engine.trace import tracing

ALL = frozenset().union(*map(primitives_of, Class))
PATTERNS = {name for name in ALL if "*" in name}
X = jax.ShapeDtypeStruct((4, 4), "float32")
V = jax.ShapeDtypeStruct((4,), "float32")
Z = jax.ShapeDtypeStruct((4, 4), "complex64")
IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 3), "float32")
KERNEL = jax.ShapeDtypeStruct((3, 3, 3, 4), "float32")
HEADS = jax.ShapeDtypeStruct((2, 4, 2, 8), "float32")
GROUPS = jax.ShapeDtypeStruct((2,), "int32")
IDS = jax.ShapeDtypeStruct((4,), "int32")
WITH_BODY = (Class.RECURSE, Class.OPAQUE, Class.LINALG)
KEY = jax.eval_shape(jax.random.key, 0)

# The first JAX that has them, and the first that no longer has them; all others are in each JAX from 0.10 to 0.12.
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


def primitives_in(fun, *args):
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fun)(*args))}


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_primitive_of_the_installed_jax_has_a_class():
    unknown = {name: module for name, module in installed_primitives().items() if classify(name) is None}
    assert not unknown, f"JAX {jax.__version__} has primitives without a class in jaxmp/engine/classes.py: {unknown}"


def test_no_primitive_is_named_twice():
    counts = Counter(name for cls in Class for name in classes._NAMES[cls])
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_table_names_only_what_this_jax_has_or_says_which_jax_has_it():
    def is_expected(name):
        since, until = (_version(bounds.get(name)) for bounds in (SINCE, UNTIL))
        return (since or (0,)) <= jax.__version_info__ and (until is None or jax.__version_info__ < until)

    installed = {
        *installed_primitives(),
        "cast_repeated",
        *(each for each in PATTERNS if filter_names(installed_primitives(), each)),
    }
    assert {name for name in ALL if is_expected(name)} - installed == set(), "not in this JAX"
    assert {name for name in ALL if not is_expected(name)} & installed == set(), "SINCE or UNTIL"


def test_patterns_are_of_opaque_primitives_only_and_each_says_a_part_of_the_name():
    assert primitives_of(Class.OPAQUE) >= PATTERNS
    assert all(len(pattern.replace("*", "")) > 3 for pattern in PATTERNS)
    assert classify("scan") is classify("custom_jvp_call") is Class.RECURSE  # a name goes before a pattern
    assert classify("random_of_tomorrow") is Class.OPAQUE and classify("a_random_one") is None


def test_versions_are_given_only_for_primitives_with_a_class():
    assert (SINCE.keys() | UNTIL.keys()) <= ALL


def _version(text):
    return text and tuple(map(int, text.split(".")))


def test_an_unknown_primitive_has_no_class():
    assert classify("someone_elses_primitive") is None


# -- how the primitives are found ------------------------------------------------------------------------------------


def test_all_public_primitives_are_found():
    names = {value.name for value in vars(jax.extend.core.primitives).values() if isinstance(value, Primitive)}
    assert len(names) > 100
    assert names <= set(installed_primitives())


def test_primitives_that_jax_does_not_publish_are_found():
    assert {"ragged_dot_general", "scatter-sub", "optimization_barrier", "shard_map", "pallas_call", "ffi_call"} <= set(
        installed_primitives()
    )


def test_a_new_primitive_in_any_module_of_jax_is_found(monkeypatch):
    monkeypatch.setattr(jax.experimental.ode, "new_p", Primitive("brand_new"), raising=False)
    assert installed_primitives.__wrapped__()["brand_new"] == "jax.experimental.ode"


def test_modules_left_out_are_there_to_be_left_out_and_say_why():
    for prefix, why in SKIPPED.items():
        package = importlib.import_module(prefix.rpartition(".")[0])
        children = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        assert any(child.name.startswith(prefix) for child in children)
        assert why


# -- what programs hold ----------------------------------------------------------------------------------------------


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


PROGRAMS = {
    "softmax": (jax.nn.softmax, (X,), "exp reduce_sum reduce_max div"),
    "log_softmax": (jax.nn.log_softmax, (X,), "exp log reduce_sum"),
    "logsumexp": (jax.nn.logsumexp, (X,), "exp log reduce_sum is_finite"),
    "variance": (jnp.var, (X,), "square reduce_sum"),
    "standardize": (jax.nn.standardize, (X,), "rsqrt"),
    "gelu": (partial(jax.nn.gelu, approximate=False), (X,), "erfc"),
    "swish": (jax.nn.swish, (X,), "logistic"),
    "einsum": (lambda x: jnp.einsum("ij,kj->ik", x, x), (X,), "dot_general"),
    "convolution": (conv, (IMAGES, KERNEL), "conv_general_dilated"),
    "gradient of a convolution": (jax.grad(total(conv), (0, 1)), (IMAGES, KERNEL), "conv_general_dilated rev"),
    "gradient of max pooling": (jax.grad(total(pool)), (IMAGES,), "select_and_scatter_add"),
    "max pooling, forward derivative": (
        lambda x: jax.jvp(pool, (x,), (x,)),
        (IMAGES,),
        "select_and_gather_add reduce_window_max",
    ),
    "mean pooling": (mean_pool, (IMAGES,), "reduce_window_sum"),
    "attention": (lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), (HEADS,), "dot_general exp"),
    "gradient of an embedding": (jax.grad(lambda x, i: x[i].sum()), (X, IDS), "scatter-add"),
    "segment_sum": (partial(jax.ops.segment_sum, num_segments=3), (V, IDS), "scatter-add"),
    "updates by index": (lambda x: x.at[0].set(1).at[1].add(2).at[2].mul(3).at[3].min(4), (V,), "scatter scatter-min"),
    "slices": (lambda x: jax.lax.dynamic_update_slice(x, x[1:, 2:], (0, 1)), (X,), "slice dynamic_update_slice"),
    "stacking": (lambda x: jnp.stack([x, jnp.flip(x)]) + jnp.pad(x, 2)[:4, :4], (X,), "concatenate|stack rev pad"),
    "sorting": (lambda x: (jnp.sort(x), jnp.argsort(x), jax.lax.top_k(x, 2), jnp.median(x)), (X,), "sort top_k"),
    "cumulative": (lambda x: (jnp.cumsum(x), jnp.cumprod(x), jax.lax.cumlogsumexp(x)), (X,), "cumsum cumlogsumexp"),
    "special": (
        lambda x: (jax.scipy.special.gammaln(x), jax.scipy.special.betainc(x, x, x), jax.scipy.special.i0(x)),
        (X,),
        "lgamma regularized_incomplete_beta bessel_i0e",
    ),
    "distributions": (lambda x: jax.scipy.stats.norm.ppf(x) + jax.scipy.stats.gamma.cdf(x, 2.0), (X,), "log igamma"),
    "solve": (lambda x: jnp.linalg.solve(x, x), (X,), "lu triangular_solve custom_linear_solve"),
    "factorisations": (
        lambda x: (jnp.linalg.qr(x), jnp.linalg.eigh(x), jnp.linalg.svd(x), jnp.linalg.cholesky(x), jnp.linalg.eig(x)),
        (X,),
        "qr eigh svd cholesky eig",
    ),
    "gradient of a determinant": (jax.grad(jnp.linalg.slogdet, has_aux=True), (X,), "lu"),
    "schur": (jax.scipy.linalg.schur, (X,), "schur"),
    "matrix exponential": (jax.scipy.linalg.expm, (X,), "cond dot_general"),
    "Fourier": (lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x)), (X,), "fft"),
    "complex": (lambda z: (z.real, z.imag, jnp.abs(z), jnp.conj(z), jax.lax.complex(z.real, z.imag)), (Z,), "complex"),
    "scan": (scan, (X,), "scan"),
    "gradient of a scan": (jax.grad(total(scan)), (X,), "scan add_any"),
    "while": (lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x), (X,), "while"),
    "fori": (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x @ x, x), (X,), "scan"),
    "switch": (lambda x: jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], x), (X,), "cond"),
    "map": (lambda x: jax.lax.map(jnp.sum, x), (X,), "scan"),
    "associative_scan": (lambda x: jax.lax.associative_scan(jnp.add, x), (X,), "add"),
    "checkpoint": (jax.grad(total(jax.checkpoint(lambda x: jnp.tanh(x @ x)))), (X,), "remat2"),
    "checkpoint_name": (lambda x: checkpoint_name(x, "x"), (X,), "name"),
    "custom_jvp": (jvp_by_hand, (X,), "custom_jvp_call"),
    "custom_vjp": (vjp_by_hand, (X,), "custom_vjp_call"),
    "custom_vmap": (vmap_by_hand, (X,), "custom_vmap_call"),
    "linearize": (lambda x: jax.linearize(vjp_by_hand, x)[1](x), (X,), "sin"),
    "jit": (jax.jit(jnp.sin), (X,), "jit sin"),
    "shard_map": (over_devices, (X,), "shard_map psum all_gather ppermute"),
    "sharding": (lambda x: jax.device_put(x, jax.devices()[0]), (X,), "device_put"),
    "random": (
        lambda key: (jax.random.normal(key), jax.random.gamma(key, 2.0), jax.random.permutation(key, 4)),
        (KEY,),
        "random_bits random_gamma erf_inv",
    ),
    "keys": (lambda key: jax.random.split(jax.random.fold_in(key, 1)), (KEY,), "random_fold_in random_split"),
    "old keys": (lambda i: jax.random.uniform(jax.random.PRNGKey(i)), (0,), "random_seed random_wrap"),
    "dropout": (lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, (4, 4)), x, 0), (X, KEY), "select_n"),
    "bits": (lambda x: jax.lax.bitcast_convert_type(x, "int32") >> 3, (X,), "bitcast_convert_type"),
    "precision": (lambda x: jax.lax.reduce_precision(x, 5, 10), (X,), "reduce_precision"),
    "casts": (lambda x: jax.lax.stop_gradient(x.astype("bfloat16")), (X,), "convert_element_type"),
    "callbacks": (callbacks, (X,), "debug_callback|debug_print pure_callback"),
    "references": (with_reference, (X,), "get addupdate|swap"),
    "barrier": (jax.lax.optimization_barrier, (X,), "optimization_barrier"),
    "reduce": (lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)), (X,), "reduce"),
    "ragged": (jax.lax.ragged_dot, (X, jax.ShapeDtypeStruct((2, 4, 4), "float32"), GROUPS), "ragged_dot_general"),
    "polynomial": (lambda x: jnp.polyval(jnp.arange(4.0), x), (X,), "mul|polynomial"),
    "image": (lambda x: jax.image.resize(x, (2, 4, 4, 3), "linear"), (IMAGES,), "dot_general"),
    "quantiles": (lambda x: jnp.quantile(x, 0.3), (X,), "sort"),
    "ode": (
        lambda x: odeint(lambda y, t: -y, x, jnp.arange(3.0)),
        (V,),
        "custom_vjp_call while",
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_hold_only_primitives_that_have_a_class(program):
    fun, args, expected = PROGRAMS[program]
    found = primitives_in(fun, *args)
    assert {name for name in found if classify(name) is None} == set()
    assert all(found & set(names.split("|")) for names in expected.split()), sorted(found)  # it tests what it says


# -- numerics behind the table ---------------------------------------------------------------------------------------


def test_what_has_a_body_is_recursed_into_or_opaque_or_linear_algebra():
    bodies = set()
    for fun, args, _ in PROGRAMS.values():
        for eqn in equations(jax.make_jaxpr(fun)(*args)):
            params = jax.tree.leaves(list(eqn.params.values()))
            if any(hasattr(param, "eqns") or hasattr(param, "jaxpr") for param in params):
                bodies.add(eqn.primitive.name)
    assert {"scan", "while", "cond", "jit", "shard_map", "custom_jvp_call"} <= bodies
    # The body of a scatter is one operation, and its name tells which.
    told = {name for name in bodies if name.startswith("scatter")}
    assert {name: classify(name) for name in bodies - told if classify(name) not in WITH_BODY} == {}


def amplification(fun, x):
    """How much larger than the argument's rounding the result's is, relative to the result or to 1 if that is less."""
    slope = jax.vmap(jax.grad(fun))(x)
    return float(jnp.max(jnp.abs(x * slope) / jnp.maximum(jnp.abs(fun(x)), 1)))


POSITIVE = jnp.logspace(-6.0, 1.9, 2000)
UNARY = sorted(name for name in primitives_of(Class.INFER) - {"integer_pow"} if hasattr(jax.lax, name))


@pytest.mark.parametrize("name", UNARY)
def test_what_is_inferred_hardly_amplifies_the_rounding_of_its_argument(name):
    assert amplification(getattr(jax.lax, name), POSITIVE) <= 4


@pytest.mark.parametrize("name", ["exp", "exp2", "expm1", "sinh", "cosh", "tan", "sin", "cos"])
def test_what_amplifies_the_rounding_of_its_argument_is_float32(name):
    assert amplification(getattr(jax.lax, name), POSITIVE) > 8
    assert classify(name) is Class.POINTWISE


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cumlogsumexp"])
def test_what_accumulates_in_half_goes_wrong_with_length(name):
    x = jnp.full((4096,), {"cumsum": 1.0, "cumprod": 1.001, "cumlogsumexp": 1.0}[name])
    # A scan adds one term after the other, as scatters and gradients do; JAX's own sums on a CPU go by halves.
    combine = {"cumsum": jnp.add, "cumprod": jnp.multiply, "cumlogsumexp": jnp.logaddexp}[name]
    half = jax.lax.scan(lambda c, v: (combine(c, v), None), x[0].astype("bfloat16"), x[1:].astype("bfloat16"))[0]
    right = getattr(jax.lax, name)(x)[-1]
    assert abs(float(half) - right) > 0.3 * right
    assert classify(name) is Class.ACCUMULATION


# -- overrides -------------------------------------------------------------------------------------------------------


def test_an_override_names_a_primitive_or_a_class():
    assert primitives_named_by("primitive:scatter-add") == {"scatter-add"}
    assert primitives_named_by("class:accumulation") == primitives_of(Class.ACCUMULATION)


def test_an_override_with_an_unknown_primitive_lists_the_nearest():
    with pytest.raises(UnknownOperationError) as error:
        primitives_named_by("primitive:scatter_add")
    text = str(error.value)
    assert "'primitive:scatter_add' names a primitive that does not exist; the nearest: 'scatter-add'," in text
    assert "jax.make_jaxpr(fun)(*args) shows the primitives of a function" in text


def test_an_override_of_all_primitives_names_the_key_for_that():
    with pytest.raises(UnknownOperationError, match=r"all operations is 'class:\*', got 'primitive:\*'; write 'class:"):
        primitives_named_by("primitive:*")


def test_an_override_with_an_unknown_class_lists_all_that_an_override_may_name_and_where_they_are_seen():
    with pytest.raises(
        UnknownOperationError, match="names a class that does not exist; the nearest: 'accumulation',"
    ) as error:
        primitives_named_by("class:accumulate")
    text = str(error.value)
    for name in ("half", "pointwise", "accumulation", "linalg", "widest", "infer"):
        assert repr(name) in text and primitives_named_by(f"class:{name}")
    assert not any(repr(name) in text for name in ("clear", "recurse", "opaque"))
    assert "make_jaxpr" not in text and text.endswith(
        "these are all; cast_plan(fun, policy)(*args) says in which one an operation is, docs/autocast.md more"
    )


@pytest.mark.parametrize("key", ["exp", "op:exp", "Primitive:exp", ""])
def test_an_override_of_another_form_says_which_forms_there_are(key):
    with pytest.raises(UnknownOperationError, match=r"by operation 'primitive:<name>' or 'class:<name>'.*got '" + key):
        primitives_named_by(key)


def test_sets_of_primitives_lie_in_the_classes_they_speak_of():
    assert primitives_of(Class.CLEAR) | {"convert_element_type"} >= MONOTONE
    assert primitives_of(Class.WIDEST) >= COMBINES


def scopes(fun, *args):
    """The scopes of each equation of a function, traced as the engine traces it."""
    with tracing(Rules(np.dtype("float16"))):
        closed = jax.make_jaxpr(fun)(*args)

    def below(jaxpr, around):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield (names := (*around, *names_of(eqn)))
            for inner in jaxprs_in(eqn):
                yield from below(inner, names)

    return list(below(closed, ()))


@pytest.mark.parametrize("name", ["log_ndtr", "betaln", "gammainc", "ndtr", "ndtri", "i0"])
def test_a_special_function_is_traced_in_a_scope(name):
    count = 2 if name in ("betaln", "gammainc") else 1

    def fun(*args):
        return getattr(jax.scipy.special, name)(*args)  # looked up while it is traced

    found = scopes(fun, *[jnp.float32(0.5)] * count)
    assert found and all(SPECIAL in names for names in found)
    inside = scopes(jax.grad(fun), *[jnp.float32(0.5)] * count)
    assert sum(SPECIAL in names for names in inside) >= 0.8 * len(inside)


def test_a_density_is_traced_in_a_scope():
    assert all(SPECIAL in names for names in scopes(lambda x: jax.scipy.stats.norm.logpdf(x), jnp.float32(1)))


def test_a_function_of_the_users_is_no_special_one_and_none_is_outside_of_a_trace():
    assert not any(SPECIAL in names for names in scopes(lambda x: jnp.tanh(x) * 2 + x, jnp.float32(1)))
    jaxpr = jax.make_jaxpr(lambda x: jax.scipy.special.ndtr(x))(jnp.float32(1))
    assert not any(SPECIAL in names_of(eqn) for eqn in jaxpr.eqns)
