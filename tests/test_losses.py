"""The cross-entropies' values and gradients, against float64."""

from __future__ import annotations

import contextlib
import math

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import losses
from jaxmp.program.walk import equations

pytestmark = pytest.mark.once

OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "softcap")
cross_entropy = jax.jit(losses.cross_entropy, static_argnames=OPTIONS)
projected_cross_entropy = jax.jit(losses.projected_cross_entropy, static_argnames=("classes", "chunks", *OPTIONS))

SOON = {"xla_backend_optimization_level": 0}  # compiles faster
TOKENS, DIM, ROWS, CLASSES = 37, 8, 24, 21
ALL = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 1e-2}


def normal(seed, *shape, dtype=jnp.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


LABELS = np.random.default_rng(0).integers(0, CLASSES, TOKENS).astype(np.int32)
LABELS[3:7] = -100


def naive(logits, labels, ignore_index=None, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """Compute the loss by its definition, in the dtype of the logits."""
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    log_softmax = jax.nn.log_softmax(logits)
    count = logits.shape[-1]
    targets = (1 - label_smoothing) * jax.nn.one_hot(labels, count, dtype=logits.dtype) + label_smoothing / count
    per_token = -(targets * log_softmax).sum(-1) + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return per_token if ignore_index is None else jnp.where(labels == ignore_index, 0, per_token)


def naive_mean(x, weights, bias, labels, dtype, ignore_index=-100, **options):
    """Compute the mean loss of logits rounded like those of a layer in ``dtype``."""
    logits = rounded(x @ rounded(weights, dtype).T, dtype) + rounded(bias, dtype)
    per_token = naive(rounded(logits, dtype)[:, :CLASSES], labels, ignore_index, **options)
    return per_token.sum() / (labels != ignore_index).sum().astype(jnp.float64)


def rounded(values, dtype):
    """Round to a half dtype, with the derivative of the identity."""
    if dtype == jnp.float32:
        return values
    return values + jax.lax.stop_gradient(values.astype(dtype).astype(values.dtype) - values)


def error(got, want):
    """Return the largest error, relative to the largest number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


# ---- cross_entropy


CASES = [
    (jnp.float32, ALL),
    (jnp.float16, ALL),
    (jnp.bfloat16, {"ignore_index": -100}),
    (jnp.float32, {**ALL, "softcap": 3.0}),
    (jnp.float16, {**ALL, "softcap": 3.0}),
    (jnp.bfloat16, {"ignore_index": -100, "softcap": 2.0}),
]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_losses_are_those_of_float64_and_the_gradient_is_rounded_once(dtype, options):
    logits, cotangent = 4 * normal(1, TOKENS, CLASSES, dtype=dtype), normal(2, TOKENS)

    def with_gradient(fun, logits, cotangent):
        losses, vjp = jax.vjp(lambda logits: fun(logits, LABELS, **options), logits)
        return losses, *vjp(cotangent)

    got, gradient = jax.jit(with_gradient, static_argnums=0)(cross_entropy, logits, cotangent)
    assert got.dtype == jnp.float32 and gradient.dtype == dtype
    with jax.enable_x64(True):
        wide = logits.astype(np.float64), cotangent.astype(np.float64)
        want, by_logits = jax.jit(with_gradient, static_argnums=0, compiler_options=SOON)(naive, *wide)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    info = jnp.finfo(dtype)
    half_ulp, least = (0.51 * float(info.eps), float(info.smallest_subnormal)) if dtype != jnp.float32 else (1e-5, 0)
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64), np.asarray(by_logits), rtol=half_ulp, atol=max(least, 1e-7)
    )
    assert not np.asarray(gradient, np.float32)[3:7].any() and not np.asarray(got)[3:7].any()


def test_the_labels_may_have_any_axes_or_none():
    logits, labels = normal(1, 2, 3, 7), np.ones((2, 3), np.int32)
    got = np.asarray(cross_entropy(logits, labels))
    assert got.shape == (2, 3)
    np.testing.assert_allclose(cross_entropy(logits[1, 2], labels[1, 2]), got[1, 2], rtol=1e-6)


def test_large_and_infinite_logits_are_no_trouble():
    logits = np.array([[60000.0, -60000.0, -np.inf]], np.float16)
    loss, gradient = jax.jit(jax.value_and_grad(lambda z: cross_entropy(z, np.array([0])).sum()))(logits)
    assert loss == 0 and not np.any(gradient)
    assert np.asarray(cross_entropy(logits, np.array([1]))).tolist() == [120000]


@pytest.mark.parametrize(
    ("dtype", "largest"), [(jnp.float32, 2.0**27), (jnp.bfloat16, 2.0**14), (jnp.float16, 2.0**15)]
)
def test_losses_and_gradients_of_large_logits_are_those_of_float64(dtype, largest):
    def stored(logits):
        return cross_entropy(logits, 0, label_smoothing=0.1)

    def fused(logits):  # x is 1, so the weights are the logits
        return projected_cross_entropy(jnp.ones((1, 1), dtype), logits[:, None], jnp.array([0]), label_smoothing=0.1)

    eps = float(jnp.finfo(dtype).eps)
    logits = (largest * np.array([1, 1, 1 - eps])).astype(dtype)  # exact
    with jax.enable_x64(True):
        want, exact = jax.value_and_grad(lambda z: naive(z, 0, label_smoothing=0.1))(logits.astype(np.float64))
    # A gradient of half logits has the error of one rounding to half, and the error of the log-sum-exp in float32.
    rtol = 1e-6 if dtype == jnp.float32 else eps / 2 + largest * 2.0**-24
    for loss, gradient in jax.jit(lambda z: [jax.value_and_grad(fun)(z) for fun in (stored, fused)])(logits):
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), exact, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_gradient_keeps_the_half_logits_and_two_float32_for_each_label(softcap):
    logits = jax.ShapeDtypeStruct((TOKENS, CLASSES), jnp.bfloat16)

    def residuals_of(z):
        return jax.vjp(lambda z: cross_entropy(z, LABELS, softcap=softcap, **ALL), z)[1]

    residuals = jax.eval_shape(residuals_of, logits)
    shapes = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(residuals))
    labels = ("int32", (TOKENS,))
    assert shapes == sorted([("bfloat16", logits.shape), *2 * [("float32", (TOKENS,))], labels])


# ---- projected_cross_entropy


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_the_fused_loss_and_its_gradients_are_those_of_float64(dtype, options):
    args = normal(1, TOKENS, DIM, dtype=dtype), normal(2, ROWS, DIM), normal(3, ROWS)

    def ours(x, weights, bias):
        return projected_cross_entropy(x, weights, LABELS, bias=bias, classes=CLASSES, chunks=4, **options)

    loss, gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(*args)
    assert loss.dtype == jnp.float32 and [g.dtype for g in gradients] == [dtype, jnp.float32, jnp.float32]
    with jax.enable_x64(True):
        wide = [array.astype(np.float64) for array in args]
        exactly = jax.value_and_grad(lambda *args: naive_mean(*args, LABELS, dtype, **options), (0, 1, 2))
        want, exact = jax.jit(exactly, compiler_options=SOON)(*wide)
    eps = float(jnp.finfo(dtype).eps)
    assert float(loss) == pytest.approx(float(want), rel=1e-6 if dtype == jnp.float32 else eps / 8)
    # The gradients of the logits and of x are rounded once each. XLA may skip roundings of the logits.
    for gradient, want, ulps in zip(gradients, exact, (1.5, 1, 0.5), strict=True):
        assert error(gradient, want) <= max(ulps * eps, 1e-6)
    assert not any(np.asarray(gradient)[CLASSES:].any() for gradient in gradients[1:])


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_on_a_tpu_the_gradient_of_the_bias_is_a_column_of_the_weights_gradient(half):
    args = normal(1, TOKENS, DIM, dtype=half), normal(2, ROWS, DIM), normal(3, ROWS)

    def ours(x, weights, bias):
        return projected_cross_entropy(x, weights, LABELS, bias=bias, classes=CLASSES, chunks=4, ignore_index=-100)

    def sums_over_tokens(program):
        shape = (-(-TOKENS // 4), ROWS)  # of the logits of a chunk
        sums = [eqn for eqn in equations(program) if eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,)]
        return [eqn for eqn in sums if eqn.invars[0].aval.shape == shape]

    results = {}
    for device, count in (("h100", 1), ("v5e", 0)):
        with jaxmp.hardware.assumed(device):
            traced = jax.jit(jax.grad(ours, (0, 1, 2))).trace(*args)
        assert len(sums_over_tokens(traced.jaxpr)) == count
        results[device] = traced.lower().compile()(*args)
    for got, want in zip(results["v5e"], results["h100"], strict=True):
        assert error(got, want) <= 2 * float(jnp.finfo(half).eps)


def test_the_gradient_of_an_unlikely_class_does_not_vanish_in_float16_however_many_tokens_there_are():
    tokens = 8192  # 1.2e-4 / 8192 underflows in float16
    x, labels = np.ones((tokens, 1), np.float16), np.zeros(tokens, np.int32)

    def loss(weights):
        return projected_cross_entropy(x, weights, labels)

    def by_hand(weights):
        return cross_entropy(x @ weights.astype(jnp.float16).T, labels).mean()

    def of_float32(weights):
        return projected_cross_entropy(x.astype(np.float32), weights, labels)

    funs = loss, jaxmp.autocast(of_float32, "mixed_float16"), by_hand
    gradients = jax.jit(lambda weights: [jax.grad(fun)(weights)[1, 0] for fun in funs])
    for likely in (9.0, 20.0):  # the other class has a probability of 1.2e-4 or 2.1e-9
        *kept_gradients, lost_gradient = gradients(np.float32([[likely], [0.0]]))
        expected = 1 / (1 + np.exp(likely))
        assert [float(gradient) for gradient in kept_gradients] == pytest.approx([expected] * 2, rel=1e-3)
        assert lost_gradient == 0


def test_no_logits_make_float16_gradients_overflow():
    x, weights = np.full((2, 1), 240, np.float16), np.float32([[250], [-250], [0]])  # logits of 60,000

    def loss(weights, dtype, z_loss):
        return projected_cross_entropy(x.astype(dtype), weights, np.array([1, 2]), z_loss=z_loss)

    @jax.jit
    def gradients(weights):
        dtypes = np.float16, np.float32
        return [[jax.grad(loss)(weights, dtype, z_loss) for dtype in dtypes] for z_loss in (0.0, 0.4)]

    for half, exact in gradients(weights):
        np.testing.assert_allclose(half, exact, rtol=2e-3)


def test_a_loss_scale_of_65536_neither_overflows_float16_nor_costs_precision():
    x, weights = normal(1, TOKENS, DIM, dtype=jnp.float16), normal(2, ROWS, DIM) / 50

    @jax.jit
    def scaled(scale):
        def loss(x, weights):
            return scale * projected_cross_entropy(x, weights, LABELS, ignore_index=-100)

        return jax.grad(loss, (0, 1))(x, weights)

    (x_scaled, weights_scaled), (x_true, weights_true) = scaled(jnp.float32(2**16)), scaled(jnp.float32(1))
    np.testing.assert_array_equal(np.asarray(weights_scaled) / 2**16, weights_true)
    x_scaled = np.asarray(x_scaled, np.float32)
    assert np.isfinite(x_scaled).all() and error(x_scaled / 2**16, x_true) < 1e-3


def test_automatic_chunks_are_as_few_as_a_share_of_the_devices_memory_allows():
    def chunks(tokens):
        shapes = jax.ShapeDtypeStruct((tokens, 8), jnp.bfloat16), jax.ShapeDtypeStruct((50304, 8), jnp.float32)
        labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        program = jax.make_jaxpr(lambda *args: losses.projected_cross_entropy(*args, chunks="auto"))(*shapes, labels)
        (loop,) = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
        return loop.params["length"]

    assert chunks(2**14) == 8  # the memory of a CPU is unknown
    assert chunks(4) == 4
    for device, number in {"h200": 1, "h100": 2, "l4": 5, "t4": 7, "v5e": 2, "v6e": 1}.items():
        with jaxmp.hardware.assumed(device):
            hardware = jaxmp.hardware.detect()
            share = hardware.memory_bytes / (8 if hardware.platform == "tpu" else 32)
            logits_and_gradient = 2 * 2**14 * 50304 * 2
            assert chunks(2**14) == number == math.ceil(logits_and_gradient / share)


@pytest.mark.parametrize("device", ["cpu", "v5e"])
@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_half_losses_are_not_negative_if_xla_fuses_the_logits_with_the_loss(device, half):
    @jax.jit  # some CPUs compute the product and the sum of the last line with one rounding, but only if it is compiled
    def logits_of(x, weights):
        return (x @ weights.T).astype(half) * half(1.7) + half(0.3)

    def losses(x, weights):
        logits = logits_of(x, weights)
        return cross_entropy(logits, jnp.argmax(logits, axis=-1))

    x, weights = (20 * normal(1, 256, 32)).astype(half), normal(2, 50, 32).astype(half)
    on_device = jaxmp.hardware.assumed(device) if device != "cpu" else contextlib.nullcontext()
    with on_device:
        compiled = jax.jit(losses)(x, weights)
    assert compiled.min() >= 0
    np.testing.assert_allclose(compiled, losses(x, weights), atol=2e-6)


def test_labels_are_looked_up_in_the_half_logits_on_a_tpu():
    shapes = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
    for device, dtype in (("h100", jnp.float32), ("v5e", jnp.bfloat16)):
        with jaxmp.hardware.assumed(device):
            program = jax.make_jaxpr(cross_entropy)(*shapes)
        tables = [eqn.invars[0].aval for eqn in equations(program) if eqn.primitive.name == "gather"]
        assert [(table.shape, table.dtype) for table in tables] == [((8, 32), dtype)]


def test_a_train_step_sets_the_number_of_automatic_chunks():
    def numbers_of_chunks(step):
        program = step.jitted.trace(state, LABELS)
        return [eqn.params["length"] for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan"]

    def loss_fn(params, labels):
        auto, fixed = (
            projected_cross_entropy(params["x"], params["weights"], labels, chunks=chunks, ignore_index=-100)
            for chunks in ("auto", 5)
        )
        return auto + fixed

    params = {"x": normal(1, TOKENS, DIM), "weights": normal(2, ROWS, DIM)}
    state = jaxmp.TrainState.create(params=params, tx=optax.sgd(0.1))
    step = jaxmp.make_train_step(loss_fn, policy="mixed_bfloat16")
    assert numbers_of_chunks(step) == [8, 5]
    assert numbers_of_chunks(step.with_options(loss_chunks=4)) == [4, 5]
    with pytest.raises(ValueError, match="loss_chunks must be a whole number of at least 1, got 0"):
        step.with_options(loss_chunks=0)


def test_the_loss_alone_computes_no_gradient():
    x, weights = normal(1, TOKENS, DIM), normal(2, ROWS, DIM)

    def loss(x, weights):
        return projected_cross_entropy(x, weights, LABELS, ignore_index=-100)

    assert str(jax.make_jaxpr(loss)(x, weights)).count("dot_general") == 1
    assert str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weights)).count("dot_general") == 3
    text = jax.jit(jax.grad(loss)).lower(x, weights).compile().as_text()
    assert text.count(" dot(") == 2  # frozen weights: their gradient is not computed


@pytest.mark.absent_gpu
def test_a_softcap_of_a_large_vocabulary_needs_no_memory_on_a_gpu():
    logits, labels = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.int32)

    def temporaries(softcap):
        def loss(logits, labels):
            return cross_entropy(logits, labels, softcap=softcap).mean()

        plan = jaxmp.inspect.memory(jax.grad(loss), device="h200")(logits, labels)
        return plan.by_kind["temporaries"]

    assert temporaries(30.0) == temporaries(None) < 256 * 4096 * 2  # a copy of the logits would be larger


def test_logits_of_padding_stay_out_of_the_largest_capped_logit():
    x, weights = np.ones((2, 1), np.float32), np.float32([[-900], [-901], [0]])
    loss = projected_cross_entropy(x, weights, np.array([0, 0]), classes=2, softcap=1e5)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-1)), rtol=1e-3)


def test_the_logits_never_exist_as_a_whole():
    x, weights = np.ones((512, 8), jnp.bfloat16), np.ones((512, 8), np.float32)
    labels = np.zeros(512, np.int32)

    def temporaries(loss):
        return (
            jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weights).compile().memory_analysis().temp_size_in_bytes
        )

    full = temporaries(lambda x, weights: cross_entropy(x @ weights.astype(x.dtype).T, labels).mean())
    chunked = temporaries(lambda x, weights: projected_cross_entropy(x, weights, labels, chunks=8))
    assert chunked < full / 4


# ---- labels


def test_labels_of_every_integer_dtype_mean_the_same():
    logits, labels = normal(1, 5, 7), np.array([0, 6, 3, 127, 1])
    want = cross_entropy(logits, labels, ignore_index=127)
    for dtype in ("int8", "uint32"):
        np.testing.assert_array_equal(cross_entropy(logits, labels.astype(dtype), ignore_index=127), want)


def test_a_label_that_is_neither_a_class_nor_ignored_makes_the_loss_nan():
    x, weights = normal(1, 3, DIM), normal(2, ROWS, DIM)
    for label in (-100, -1, CLASSES, 2**31 - 1):
        labels = np.array([1, label, 2])
        assert np.isnan(cross_entropy(normal(1, 3, CLASSES), labels)).tolist() == [False, True, False]
    assert np.isnan(projected_cross_entropy(x, weights, np.array([0, 1, CLASSES]), classes=CLASSES))


def test_if_all_labels_are_ignored_the_loss_and_its_gradients_are_0():
    def loss(x, weights):
        return projected_cross_entropy(x, weights, jnp.full(3, -100), ignore_index=-100)

    loss, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(normal(1, 3, DIM), normal(2, ROWS, DIM))
    assert loss == 0 and not any(np.asarray(gradient).any() for gradient in gradients)


# ---- what is refused


LOGITS = {"logits": concrete.ones((2, 3)), "labels": np.zeros(2, int)}
FUSED = {"x": concrete.ones((4, 3)), "weights": concrete.ones((6, 3)), "labels": np.zeros(4, int)}


@pytest.mark.parametrize(
    ("inputs", "changes", "error", "phrase"),
    [
        (LOGITS, {"logits": np.ones((2, 3), int)}, TypeError, "logits must have a floating dtype, got int"),
        (
            LOGITS,
            {"logits": concrete.ones(()), "labels": np.zeros((), int)},
            ValueError,
            r"classes\), got the shape \(\)",
        ),
        (LOGITS, {"labels": np.zeros(2, bool)}, TypeError, "have an integer dtype, got bool"),
        (LOGITS, {"labels": np.zeros(2, np.float32)}, TypeError, "have an integer dtype, got float32.*argmax"),
        (LOGITS, {"label_smoothing": 1.0}, ValueError, "less than 1, got 1.0"),
        (LOGITS, {"label_smoothing": -0.1}, ValueError, "at least 0 .*got -0.1"),
        (LOGITS, {"z_loss": np.nan}, ValueError, "at least 0, got nan"),
        (LOGITS, {"ignore_index": 2**40}, OverflowError, "overflow"),
        (FUSED, {"x": concrete.ones((4, 5))}, ValueError, r"\(4, 5\) and \(6, 3\).*transpose"),
        (FUSED, {"x": concrete.ones((2, 2, 3))}, ValueError, r"\(2, 2, 3\).*reshape x"),
        (FUSED, {"x": concrete.ones((4, 0)), "weights": concrete.ones((6, 0))}, ValueError, r"\(4, 0\) and \(6, 0\)"),
        (FUSED, {"weights": np.ones((6, 3), int)}, TypeError, "weights must have a floating dtype"),
        (FUSED, {"bias": concrete.ones(5)}, ValueError, r"the shape \(6,\), one number per row of weights, got \(5,\)"),
        (FUSED, {"classes": 7}, ValueError, r"from 1 to 6, the rows of weights, got 7"),
        (FUSED, {"classes": 2.5}, ValueError, "from 1 .* got 2.5"),
        (FUSED, {"chunks": 0}, ValueError, "chunks must be an integer of at least 1 or 'auto', got 0"),
        (FUSED, {"chunks": "all"}, ValueError, "at least 1 or 'auto', got 'all'; write chunks='auto'"),
        (
            FUSED,
            {"labels": np.zeros((4, 1), int)},
            ValueError,
            r"the shape \(4,\), one per row of logits, got .*\(4, 1\)",
        ),
        (FUSED, {"z_loss": -1}, ValueError, "a Python number of at least 0, got -1"),
        (LOGITS, {"softcap": 0.0}, ValueError, r"a Python number above 0, got 0.0; write softcap=30.0"),
        (FUSED, {"softcap": math.nan}, ValueError, "a Python number above 0, got nan"),
        (FUSED, {"softcap": jnp.cumsum}, ValueError, "softcap must be a Python number above 0, got <"),
    ],
)
def test_invalid_inputs_and_options_are_refused(inputs, changes, error, phrase):
    fun = losses.cross_entropy if inputs is LOGITS else losses.projected_cross_entropy
    options = {**inputs, **changes}
    args = [options.pop(name) for name in inputs]
    with pytest.raises(error, match=phrase):
        fun(*args, **options)


def test_logits_of_padding_that_overflow_change_nothing():
    x, weights, labels = np.full((2, 4), 200, np.float16), np.zeros((4, 4), np.float32), np.array([0, 1])
    weights[3] = 1000  # the row of padding: its logits are infinite in float16

    def loss(x, weights, classes):
        return projected_cross_entropy(x, weights, labels, classes=classes)

    @jax.jit
    def with_and_without_padding(x, weights):
        gradient = jax.value_and_grad(loss, (0, 1))
        return gradient(x, weights, 3), gradient(x, weights[:3], 3)

    (value, gradients), (expected, gradients_without) = with_and_without_padding(x, weights)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], gradients_without[0])
    np.testing.assert_allclose(gradients[1][:3], gradients_without[1])
    assert not np.any(gradients[1][3])


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_ignored_tokens_count_for_nothing_even_if_they_are_not_finite(number):
    ignored = int(np.argmax(LABELS == -100))
    weights = normal(2, ROWS, DIM)

    def loss(tokens):
        x, logits = tokens
        projected = projected_cross_entropy(x, weights, LABELS, ignore_index=-100)
        return projected + cross_entropy(logits, LABELS, ignore_index=-100).sum()

    tokens = normal(1, TOKENS, DIM), normal(3, TOKENS, CLASSES)
    want = jax.value_and_grad(loss)(tokens)
    for array in tokens:
        array[ignored] = number
    jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(loss)(tokens), want)
