"""Casts, finiteness and selection over pytrees, against NumPy."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer_tools import same_bits

from jaxmp.base import trees

pytestmark = pytest.mark.once

HALF = [jnp.float16, jnp.bfloat16]


# ---- cast and widen


def test_cast_rounds_to_nearest_even_and_overflows_to_infinity():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2.0**-25, -(2.0**-24), np.nan], np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(trees.cast(concrete.array(x), jnp.float16), expected)


def test_cast_and_widen_keep_shardings_and_work_under_jit():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.device_put(concrete.arange(8.0), sharding)
    half = trees.cast(x, jnp.float16)
    assert half.sharding == sharding
    assert trees.widen(half).sharding == sharding
    assert jax.jit(trees.widen)(half).dtype == jnp.float32
    assert trees.cast(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding), jnp.float16).sharding == sharding


def test_widen_brings_narrow_floats_to_float32_exactly_and_leaves_the_rest():
    narrow = {str(d): concrete.array([1.5, -2.0], d) for d in (jnp.float16, jnp.bfloat16, jnp.float8_e5m2)}
    wide = {
        "f32": concrete.ones(2),
        "f64": np.ones(2),
        "int": concrete.arange(2),
        "bool": True,
        "c": concrete.array(1j),
        "none": None,
    }
    got = trees.widen({**narrow, **wide})
    for name in narrow:
        assert got[name].dtype == jnp.float32
        np.testing.assert_array_equal(got[name], [1.5, -2.0])
    assert all(got[name] is wide[name] for name in wide)


# ---- all_finite, sum_of_squares and max_abs


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        (np.inf, jnp.float32),
        (np.nan, jnp.float16),
        (-np.inf, jnp.bfloat16),
        (np.nan, jnp.complex64),
        (-np.inf, np.float64),
    ],
)
def test_one_bad_element_in_one_leaf_is_found(bad, dtype):
    make = np.asarray if dtype == np.float64 else concrete.array
    good = {"a": make(np.ones((2, 3)), dtype), "b": [make(np.zeros(5), dtype)]}
    assert trees.all_finite(good)
    for leaf in range(2):
        leaves = jax.tree.leaves(good)
        array = np.array(leaves[leaf])
        array.ravel()[-1] = bad
        leaves[leaf] = make(array, dtype)
        assert not trees.all_finite(leaves)


def test_a_bad_imaginary_part_is_found():
    assert not trees.all_finite(concrete.array([1 + 1j * np.inf]))
    assert not trees.all_finite(concrete.array([complex(1, np.nan)]))


def test_infinities_of_both_signs_do_not_cancel():
    assert not trees.all_finite(
        [concrete.array([jnp.inf, -jnp.inf]), concrete.array(-jnp.inf), concrete.array(jnp.inf)]
    )


def test_the_largest_and_smallest_finite_numbers_are_finite():
    for dtype in (jnp.float32, *HALF):
        info = jnp.finfo(dtype)
        leaves = [np.full(1000, info.max, dtype), np.full(1000, info.min, dtype), np.full(3, info.tiny, dtype)]
        assert trees.all_finite(jax.tree.map(concrete.array, leaves))
    with jax.enable_x64(True):
        assert trees.all_finite(concrete.full(3, 1e308))  # finite in its own dtype, though not in float32
    assert trees.all_finite(concrete.array(3e38 + 3e38j))


def test_trees_without_floating_elements_are_finite():
    for empty in (
        {},
        None,
        [],
        concrete.zeros((0, 3)),
        {"n": concrete.arange(3), "k": jax.random.key(0), "b": True, "s": "x"},
    ):
        assert trees.all_finite(empty)
        assert trees.all_finite(empty).shape == ()
    assert not trees.all_finite({"python": float("nan")})


def test_finiteness_is_a_bool_scalar_under_jit_and_one_per_member_under_vmap():
    x = concrete.array([[1.0, 2.0], [jnp.nan, 1.0], [0.0, -jnp.inf]])
    np.testing.assert_array_equal(jax.vmap(trees.all_finite)({"x": x}), [True, False, False])
    assert jax.jit(trees.all_finite)(x).dtype == jnp.bool_


def leaves_of(numbers):
    """Draw up to three leaves of one shape. Other shapes would compile other programs."""
    return st.lists(st.lists(numbers, min_size=3, max_size=3), max_size=3)


@given(leaves_of(st.floats(-(2.0**60), 2.0**60, width=32)))
def test_the_sum_of_squares_is_numpys(lists):
    expected = sum(float(x) ** 2 for values in lists for x in values)
    total = trees.sum_of_squares([concrete.array(values, jnp.float32) for values in lists])
    assert total.dtype == jnp.float32 and total.shape == ()
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-37)


def test_the_sum_of_squares_takes_leaves_of_every_kind():
    leaves = {"n": concrete.arange(3), "k": jax.random.key(0), "b": True, "s": "x", "none": None}
    assert trees.sum_of_squares({}) == trees.sum_of_squares(leaves) == 0
    assert trees.sum_of_squares({**leaves, "c": concrete.array([3 + 4j]), "p": 5.0}) == 50
    assert trees.sum_of_squares([concrete.full(4, 300, jnp.float16), concrete.full(4, 300, jnp.bfloat16)]) == 720000
    assert np.isinf(trees.sum_of_squares([concrete.array([1.0, 2e19])]))
    for bad in (np.nan, np.inf, -np.inf, complex(np.inf, np.nan)):
        assert not np.isfinite(trees.sum_of_squares([concrete.ones(2), concrete.array([1, bad])]))
    with jax.enable_x64(True):
        total = trees.sum_of_squares([concrete.full(2, 1e100), concrete.ones(2, jnp.float16)])
        assert total.dtype == jnp.float64 and total == 2e200


@given(leaves_of(st.floats(width=32)))
def test_finiteness_and_largest_magnitude_agree_with_numpy(lists):
    arrays = [np.array(values, np.float32) for values in lists]
    flat = np.concatenate([*arrays, np.zeros(1, np.float32)])
    leaves = [concrete.array(array) for array in arrays]
    assert bool(trees.all_finite(leaves)) == np.isfinite(flat).all()
    largest = np.abs(flat).max()
    tiny = np.finfo(np.float32).tiny  # a CPU may flush smaller numbers to 0
    np.testing.assert_allclose(trees.max_abs(leaves), largest if np.isnan(largest) or largest >= tiny else 0, atol=tiny)


def test_max_abs_is_float32_ignores_integers_and_keeps_nan():
    assert trees.max_abs({}) == 0 and trees.max_abs({}).dtype == jnp.float32
    assert trees.max_abs([concrete.array([2.0, -3.0], jnp.float16), concrete.array([100]), concrete.zeros(0)]) == 3
    assert trees.max_abs([concrete.array(3 + 4j), concrete.array(1.0)]) == 5
    assert jnp.isnan(trees.max_abs([concrete.array([1.0, jnp.nan]), concrete.array(5.0)]))
    assert jnp.isnan(trees.max_abs([concrete.array(5.0), concrete.array([jnp.nan, 1.0])]))
    assert trees.max_abs(concrete.array([-jnp.inf])) == jnp.inf


# ---- select_tree


def special_tree(seed):
    nan_with_payload = np.array([0x7FC00123, 0xFF800001], np.uint32).view(np.float32)
    return {
        "float": concrete.array([-0.0, 0.0, jnp.inf, -jnp.inf, float(seed)]),
        "nan": concrete.array(nan_with_payload),
        "half": concrete.array([seed], jnp.float16),
        "int": concrete.array([seed, -1]),
        "bool": concrete.array(bool(seed % 2)),
        "complex": concrete.array(complex(-0.0, -0.0)),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed), 2),
        "old_key": jax.random.PRNGKey(seed),
        "empty": concrete.zeros((0, 2)),
        "none": None,
        "masked": optax.MaskedNode(),
    }


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_selection_is_bit_for_bit_for_every_kind_of_leaf(transform):
    a, b = special_tree(1), special_tree(2)
    select = transform(trees.select_tree)
    assert same_bits(select(concrete.array(True), a, b), a)
    assert same_bits(select(concrete.array(False), a, b), b)


def test_selection_keeps_the_dtypes_of_what_is_kept():
    got = trees.select_tree(
        True, {"a": concrete.ones(2), "n": 3.0}, {"a": concrete.zeros(2, jnp.float16), "n": concrete.array(0)}
    )
    assert got["a"].dtype == jnp.float16 and got["n"].dtype == jnp.int32 and got["n"] == 3


def test_selection_passes_on_the_same_object_and_what_nobody_looks_at():
    marker = object()  # not an array
    assert trees.select_tree(concrete.array(True), {"a": marker}, {"a": marker})["a"] is marker


def test_selection_under_vmap_has_one_flag_per_member():
    got = jax.vmap(trees.select_tree)(concrete.array([True, False]), concrete.ones((2, 3)), concrete.zeros((2, 3)))
    np.testing.assert_array_equal(got, [[1, 1, 1], [0, 0, 0]])


def test_trees_or_leaves_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="structure error"):
        trees.select_tree(True, {"a": 1}, {"b": 1})
    with pytest.raises(TypeError, match="same shapes"):
        trees.select_tree(True, concrete.ones(3), concrete.zeros(()))
    with pytest.raises(TypeError, match=r"got complex64 for float32; start with a complex leaf, or return its real"):
        trees.select_tree(True, concrete.ones(3, jnp.complex64), concrete.zeros(3))


def test_a_path_reads_as_users_write_it():
    paths = jax.tree_util.tree_leaves_with_path({"encoder": [{"kernel": 1}]})
    assert trees.path_name(paths[0][0]) == "encoder/0/kernel"


def test_select_tree_keeps_the_explicit_sharding_of_the_second_tree():
    mesh = jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.set_mesh(mesh) if hasattr(jax.sharding, "set_mesh") else jax.set_mesh(mesh):
        new, old = jax.device_put(concrete.ones(4), jax.P("m")), jax.device_put(concrete.zeros(4), jax.P())
        got = jax.jit(trees.select_tree)(concrete.array(True), new, old)
        assert jax.typeof(got).sharding.spec == jax.typeof(old).sharding.spec
        np.testing.assert_array_equal(got, np.ones(4))
