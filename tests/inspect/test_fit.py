"""``fit`` finds the fastest combination of remat, chunks of the loss and microbatches that fits."""

from __future__ import annotations

import itertools
import json
import math

import flax.linen as nn
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given

import jaxmp
from jaxmp.cli import main
from jaxmp.inspect import Fit, Trial, fit
from jaxmp.inspect._fit import fit as fit_module
from jaxmp.inspect._fit.combinations import LOSS_CHUNKS, REMATS, SMALL_COST, fastest, measure_combinations
from jaxmp.inspect._fit.fit import limit_of
from jaxmp.losses import projected_cross_entropy

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]  # optax's Adam mixes dtypes
STATE = 100.0
CHUNK_TIME = 0.01


def trials_of(activations, milliseconds, chunks, counts, limit, compiles_below=math.inf, logits=0.0, per_chunk=0.0):
    """Return the trial of every combination, of a step whose memory and time are known.

    Each chunk needs ``per_chunk`` bytes. A combination with a peak of at least ``compiles_below`` does not compile.
    """
    trials = {}
    for remat, number, count in itertools.product(activations, chunks, counts):
        peak = STATE + (activations[remat] + logits / (number or 1)) / count + per_chunk * (number or 0)
        time = milliseconds[remat] + 3 * count  # each microbatch costs the same time
        time += CHUNK_TIME * count * (number or 0)
        if peak >= compiles_below:
            peak = time = math.inf
        trials[remat, number, count] = Trial(remat, count, peak, time, peak <= limit, STATE, number)
    return trials


@given(
    st.permutations([1000.0, 600.0, 300.0, 50.0]),
    st.lists(st.floats(50, 90), min_size=4, max_size=4),
    st.sampled_from([[1], [1, 2, 4, 8, 16, 32], [1, 3, 5, 15], [2, 4, 8]]),
    st.floats(90, 1200),
    st.sets(st.sampled_from(REMATS[1:])),
    st.sampled_from([math.inf, 1050.0, 650.0, 120.0]),
)
def test_the_search_finds_the_fastest_of_all_combinations(activations, times, counts, limit, refused, compiles_below):
    activations = {remat: size for remat, size in zip(REMATS, activations, strict=True) if remat not in refused}
    milliseconds = dict(zip(REMATS, times, strict=True)) | {"none": 50.0}
    limit = min(limit, compiles_below)
    every = trials_of(activations, milliseconds, [None], counts, limit, compiles_below)
    measured = measure_combinations(lambda *options: every.get(options), REMATS, [None], counts, limit)
    best, best_measured = fastest(list(every.values())), fastest(measured)
    assert (best_measured and best_measured.milliseconds) == (best and best.milliseconds)
    assert len(measured) == len(set(measured))


@given(
    st.permutations([1000.0, 600.0, 300.0, 50.0]),
    st.lists(st.floats(50, 90), min_size=4, max_size=4),
    st.sampled_from([[1], [1, 2, 4, 8, 16, 32], [1, 3, 5, 15], [2, 4, 8]]),
    st.floats(90, 1200),
    st.sampled_from([0.0, 2.0, 30.0]),
)
def test_the_search_finds_no_slower_combination_because_it_also_tries_chunks(
    activations, times, counts, limit, per_chunk
):
    activations = dict(zip(REMATS, activations, strict=True))
    milliseconds = dict(zip(REMATS, times, strict=True)) | {"none": 50.0}
    every = trials_of(activations, milliseconds, LOSS_CHUNKS, counts, limit, logits=500.0, per_chunk=per_chunk)

    def fastest_with(chunks):
        measured = measure_combinations(lambda *options: every[options], REMATS, chunks, counts, limit)
        assert len(measured) == len(set(measured))
        best = fastest(measured)
        return math.inf if best is None else best.milliseconds

    with_chunks, without = fastest_with(LOSS_CHUNKS), fastest_with(LOSS_CHUNKS[:1])
    assert with_chunks <= (1 + SMALL_COST) * without
    if per_chunk == 0:
        assert math.isinf(with_chunks) == (fastest(list(every.values())) is None)


def test_a_step_that_fits_as_it_is_needs_one_compilation():
    every = trials_of(dict.fromkeys(REMATS, 10.0), dict.fromkeys(REMATS, 1.0), [1, 4], [1, 2], 200)
    assert measure_combinations(lambda *options: every[options], REMATS, [1, 4], [1, 2], 200) == [every["none", 1, 1]]


def report(limit: int) -> Fit:
    trials = [Trial("dots", 2, 7 * 2**30, 12.34, limit >= 7 * 2**30), Trial("none", 1, math.inf, math.inf, False)]
    return Fit("NVIDIA H200", limit, 64, tuple(trials), notes=("a remark",))


def test_the_report_says_what_to_write():
    text = str(report(8 * 2**30))
    assert text.startswith("7 GiB of 8 GiB on NVIDIA H200, batch of 64\n")
    assert "make_train_step(loss_fn, remat='dots', accumulate_steps=2)" in text
    assert "does not compile" in text and "12.3" in text
    assert text.endswith("a remark\nmeasured errors of predicted times are up to 12%")
    assert report(8 * 2**30).options == {"remat": "dots", "accumulate_steps": 2}
    assert json.loads(report(8 * 2**30).to_json())["trials"][1]["peak"] is None


def test_the_report_of_a_step_that_does_not_fit_says_what_else_to_try():
    assert str(report(2**30)).startswith("nothing fits into 1 GiB of NVIDIA H200, batch of 64\n")
    with pytest.raises(ValueError, match=r"the lowest peak is 7 GiB\. Use a smaller batch"):
        _ = report(2**30).options


def test_the_limit_is_the_share_that_jax_takes(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    gpu = jaxmp.hardware.detect("a100")
    assert limit_of(gpu) == int(0.75 * gpu.memory_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert limit_of(gpu) == int(0.9 * gpu.memory_bytes)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "75%")
    with pytest.raises(ValueError, match=r"XLA_CLIENT_MEM_FRACTION must be a number such as 0\.9, got '75%'"):
        limit_of(gpu)


def test_wrong_arguments_are_errors(capsys):
    with pytest.raises(TypeError, match="fit takes a train step"):
        fit(jnp.sin)
    for memory in ("40GB", True, math.inf):
        with pytest.raises(ValueError, match="memory is a positive number of bytes"):
            fit(jnp.sin, memory=memory)
    with pytest.raises(ValueError, match=r"margin is a share of the peak from 0 to 1, got 7; write e.g. 0.1"):
        fit(jnp.sin, margin=7)
    with pytest.raises(ValueError, match=r"a number of bytes, got 40; for 40 GiB, write memory=40 \* 2\*\*30"):
        fit(jnp.sin, memory=40)
    state = jaxmp.TrainState.create(params=jnp.ones(()), tx=optax.sgd(0.1))
    step = jaxmp.make_train_step(lambda params, batch: params * jnp.mean(batch))
    with pytest.raises(ValueError, match="the peak rates of the device"):
        fit(step)(state, jnp.ones(8))
    assert main(["fit", "jax.numpy:sin", "--arg", "float32[8]", "--device", "h100"]) == 2
    assert "fit takes a train step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", "jax.numpy:sin", "--arg", "float32[8]", "--memory", "4GB"])
    assert "argument --memory: invalid float value: '4GB'" in capsys.readouterr().err


@pytest.fixture
def fit_on_cpu(monkeypatch):
    """Return ``fit`` for the attached CPU, as if it had the rates of an H100."""
    monkeypatch.setattr(fit_module, "hardware_of", lambda device: jaxmp.hardware.detect("h100"))
    return lambda step, memory: fit(step, memory=memory)


def step_and_state(loss_fn, **options):
    tx = optax.sgd(0.1)
    return jaxmp.make_train_step(loss_fn, **options), jaxmp.TrainState.create(params=jnp.ones((8, 8)), tx=tx)


def test_a_step_fits_only_with_a_margin_above_its_compiled_peak(fit_on_cpu):
    step = jaxmp.make_train_step(lambda params, x: jnp.mean(jnp.tanh(x @ params) @ params))
    state = jaxmp.TrainState.create(params=jnp.ones((64, 64)), tx=optax.sgd(0.1))
    batch = np.ones((1, 64), np.float32)  # too small to be split
    peak = fit_on_cpu(step, 2**20)(state, batch).best.peak
    limit = int(1.05 * peak)
    tight = fit_on_cpu(step, limit)(state, batch)
    assert tight.best is None and str(tight).startswith("nothing fits into ")
    assert " with a margin of 7%, batch of 1" in str(tight).splitlines()[0]
    assert fit_on_cpu(step, int(1.08 * peak))(state, batch).best.peak == peak
    assert fit(step, memory=limit, margin=0.0)(state, batch).best.peak == peak
    assert fit(step, memory=peak, margin=0.0)(state, batch).best.peak == peak


def test_a_loop_of_unknown_length_is_not_counted(fit_on_cpu):
    def loss_fn(params, x):
        turns = jax.lax.while_loop(lambda n: n < jnp.sum(x), lambda n: n + 1, 0.0)
        return jnp.mean(x @ params) * turns

    step, state = step_and_state(loss_fn)
    result = fit_on_cpu(step, 2**20)(state, np.ones((4, 8), np.float32))
    assert any("the iterations of the loop" in name for name in result.not_counted)
    assert "not counted: " in str(result)
    step, state = step_and_state(lambda params, x: jnp.mean(x @ params))
    assert fit_on_cpu(step, 2**20)(state, np.ones((4, 8), np.float32)).not_counted == ()


def test_a_batch_that_cannot_be_split_is_not_split(fit_on_cpu):
    def weighted(params, batch):
        return jnp.mean(jnp.tanh(batch["x"] @ params) ** 2 * batch["weights"])

    step, state = step_and_state(weighted, accumulate_steps=1)
    batch = {"weights": np.ones(8, np.float32), "x": np.ones((64, 8), np.float32)}
    result = fit_on_cpu(step, 2**10)(state, batch)
    assert result.batch == 64 and result.best is None
    assert {trial.accumulate_steps for trial in result.trials} == {1}

    def contrastive(params, batch):
        z = batch @ params
        return jnp.mean((z @ z.T - jnp.eye(64)) ** 2)

    step, state = step_and_state(contrastive)
    text = str(fit_on_cpu(step, 4096)(state, np.ones((64, 8), np.float32)))
    assert "microbatches are not possible: " in text
    with pytest.raises(TypeError, match=r"takes \(state, batch\), got \(TrainState\); write step"):
        fit_on_cpu(step, 4096)(state)


def test_the_own_remat_of_a_step_is_tried_too(fit_on_cpu):
    step, state = step_and_state(lambda params, x: jnp.mean(jnp.tanh(x @ params) @ params), remat="dots_saveable")
    result = fit_on_cpu(step, 2**10)(state, np.ones((31, 8), np.float32))
    assert {trial.remat for trial in result.trials} == {"none", "dots", "dots_no_batch", "dots_saveable"}


def chunked_step(chunks):
    """Return a step whose loss has the given number of chunks, its state and a batch."""

    def loss_fn(params, batch):
        return projected_cross_entropy(batch["x"] @ params, batch["table"], batch["labels"], chunks=chunks)

    batch = {"x": np.ones((64, 8)), "table": np.ones((512, 8)), "labels": np.zeros(64)}
    batch = {name: array.astype("int32" if name == "labels" else "float32") for name, array in batch.items()}
    return *step_and_state(loss_fn, policy="mixed_bfloat16"), batch


def test_chunks_are_tried_if_the_loss_leaves_their_number_open(fit_on_cpu):
    step, state, batch = chunked_step("auto")
    unsplit = fit_on_cpu(step, 2**30)(state, batch)
    assert len(unsplit.trials) == 1
    assert unsplit.options == {"remat": "none", "loss_chunks": 1, "accumulate_steps": 1}
    result = fit_on_cpu(step, int(1.07 * unsplit.trials[0].peak) - 1)(state, batch)
    assert result.options == {"remat": "none", "loss_chunks": 4, "accumulate_steps": 1}
    assert str(result).splitlines()[1].split()[:3] == ["remat", "loss_chunks", "accumulate_steps"]


def test_a_loss_with_its_own_number_of_chunks_keeps_it(fit_on_cpu, monkeypatch):
    def only_chunks(measure, remats, chunks, counts, limit):
        return [measure(remats[0], number, counts[0]) for number in chunks]

    monkeypatch.setattr(fit_module, "measure_combinations", only_chunks)
    step, state, batch = chunked_step(8)
    result = fit_on_cpu(step, 2**30)(state, batch)
    assert [trial.loss_chunks for trial in result.trials] == [None]
    assert result.options == {"remat": "none", "accumulate_steps": 1}
    assert "loss_chunks" not in str(result)


def test_batch_statistics_are_mentioned_only_if_the_model_has_them(fit_on_cpu, monkeypatch):
    monkeypatch.setattr(fit_module, "measure_combinations", lambda measure, *_: [measure("none", None, 2)])
    rngs = nnx.Rngs(0)
    for last_layer, has_statistics in ((nnx.BatchNorm(8, rngs=rngs), True), (nnx.Dropout(0.5, rngs=rngs), False)):
        model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), last_layer)
        optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
        step = jaxmp.nnx.make_train_step(lambda model, x: (model(x) ** 2).mean())
        result = fit_on_cpu(step, 2**30)(model, optimizer, np.ones((4, 8), np.float32))
        assert result.best is not None and result.best.accumulate_steps == 2
        assert ("batch statistics" in str(result)) == has_statistics


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(256)(jnp.tanh(nn.Dense(2048)(x)))


@pytest.mark.slow("compiles nine programs; the page on fit compiles five of them")
@pytest.mark.absent_gpu
def test_the_best_combination_compiles_within_the_limit():
    model = jaxmp.linen.apply_policy(nn.Sequential([Block(), Block()]), "mixed_bfloat16")
    batch = jax.ShapeDtypeStruct((4096, 256), np.float32)

    def make_state(x):
        return jaxmp.TrainState.create(params=model.init(jax.random.key(0), x)["params"], tx=optax.sgd(0.1))

    args = jax.eval_shape(make_state, batch), batch
    step = jaxmp.make_train_step(lambda params, x: (model.apply({"params": params}, x) ** 2).mean())
    limit = 64 * 2**20
    result = fit(step, device="h100", memory=limit)(*args)
    assert {trial.remat for trial in result.trials} == set(REMATS)
    assert result.best is not None and result.memory is not None
    assert result.best.peak == result.memory.peak <= limit / 1.07
    assert all(trial.peak > limit / 1.07 for trial in result.trials if not trial.fits)
    proposed = step.with_options(**result.options)
    assert jaxmp.inspect.memory(proposed, device="h100")(*args).peak == result.best.peak


@pytest.mark.absent_gpu
def test_a_model_without_layers_is_tried_with_the_other_rematerialisations():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    step = jaxmp.nnx.make_train_step(lambda model, x: (model(jnp.tanh(model(x))) ** 2).mean())
    result = fit(step, device="h100", memory=2**10)(model, optimizer, jax.ShapeDtypeStruct((2, 64), np.float32))
    assert result.best is None and {trial.remat for trial in result.trials} == {"none", "dots", "dots_no_batch"}
