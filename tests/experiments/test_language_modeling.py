"""GPT-2 on any text: training, resuming, sampling, and defaults of flags."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import language_modeling
from experiments.data import DataError, tokens
from experiments.training import loop, sampling, text_training

NEXT_TOKEN = dict.fromkeys(("layers", "heads", "width", "schedule")) | {"vocabulary": 50}
LINES = "to be or not to be, that is the question\n\nwhether tis nobler in the mind to suffer\n\n"


pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return the flags of a tiny GPT-2, with every flag that changes the step."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "text.txt").write_text(LINES * 100)
    return language_modeling.Config(
        model="gpt2", dataset=str(folder / "text.txt"), data_dir=folder / "data", run_dir=folder / "run",
        layers=1, heads=2, width=32, context=16, batch_size=8, steps=160, test_batches=2, learning_rate=0.01,
        policy="mixed_bfloat16", loss_scale="dynamic:1024,period=10", accumulate=2, remat="attention",
        override=("ln_f=float32",), evaluate_every=120, checkpoint_every=120, sample_tokens=30, temperature=0.0,
    )  # fmt: skip


@pytest.mark.slow("trains 160 steps")
def test_gpt2_learns_a_text_and_writes_in_its_words(config):
    done = language_modeling.train(config)
    text = done["texts"]["Sample"]
    assert text.startswith("\n\n") and len(text) == 32
    assert any(word in text for word in (" to", " be", "the", "not", "whe"))
    assert done["test_loss"] < 2.2
    assert done["test_perplexity"] == pytest.approx(math.exp(done["test_loss"]))
    text_tokens = tokens.load(config.dataset, "bytes", 2048)
    assert done["test_bits_per_byte"] == pytest.approx(done["test_loss"] / math.log(2) / text_tokens.bytes_per_token)
    assert done["examples_are"] == "tokens" and done["data"].endswith(", bytes") and done["examples_per_s"] > 0
    flags = json.loads((config.run_dir / "config.json").read_text())["config"]
    assert (flags["schedule"], flags["clip"], flags["weight_decay"]) == ("cosine", 1.0, 0.1)
    assert (config.run_dir / "curves.png").stat().st_size > 10_000


# --- flags ----------------------------------------------------------------------------------------------------------


def test_flags_that_are_not_given_depend_on_the_model_its_size_and_the_device(monkeypatch):
    plain = text_training.settled(language_modeling.Config(), "next_token")
    assert (plain.vocabulary, plain.context, plain.batch_size, plain.steps) == (2048, 4, 8192, 150)
    assert (plain.learning_rate, plain.test_batches, plain.layers) == (3e-3, 8, None)
    small = text_training.settled(language_modeling.Config(layers=2), "gpt2")
    assert (small.layers, small.width, small.context) == (2, 128, 128)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    large = text_training.settled(language_modeling.Config(), "gpt2")
    assert (large.layers, large.heads, large.width, large.context, large.batch_size) == (12, 12, 768, 1024, 16)
    assert text_training.settled(language_modeling.Config(), "bert").context == 512

    flags = language_modeling.settled(language_modeling.Config(model="gpt2", size="7B", layers=2))
    assert (flags.layers, flags.heads, flags.width, flags.context) == (2, 32, 4096, 2048)
    with pytest.raises(ValueError, match="--model next_token has no --size, got 7B; --model gpt2 has"):
        language_modeling.prepare(language_modeling.Config(size="7B"))


def test_a_size_has_the_params_that_its_name_says(config):
    def count(vocabulary, layers, heads, width, context):
        assert width // heads in (64, 128)
        return (vocabulary + context) * width + layers * (12 * width + 13) * width + 2 * width

    for size, flags in language_modeling.SIZES.items():
        unit = {"M": 10**6, "B": 10**9}[size[-1]]
        decimals = len(size.partition(".")[2][:-1])
        assert f"{count(50304, **flags) / unit:.{decimals}f}" == size[:-1]
        assert flags["context"] == (1024 if unit == 10**6 else 2048)
    none = dict.fromkeys(("layers", "heads", "width", "context"))
    flags = language_modeling.settled(dataclasses.replace(config, size="355M", **none))
    flags = dataclasses.replace(flags, vocabulary=1000, layers=2, context=16)  # these flags are kept
    model = language_modeling.gpt2(flags, text_training.load(flags)).model
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    assert sum(leaf.size for leaf in shapes) == count(1024, 2, 16, 1024, 16)


def test_flags_that_do_not_suit_the_text_or_the_model_are_errors(config):
    for flags, message in [
        ({"vocabulary": 100}, "--vocabulary must be at least the 257 tokens of bytes, got 100"),
        ({"tokens": "pairs", "vocabulary": 0}, "2 to 65536 tokens, got --vocabulary 0"),
        ({"weight_decay": math.inf}, "--weight-decay must be at least 0 and finite, got inf"),
        ({"model": "next_token", **NEXT_TOKEN, "context": 9000}, "more than the 9000 pairs of bytes of --context, got"),
        ({"context": 5000}, "shorter than the held-out text of .* tokens, got --context 5000"),
        ({"tokens": "pairs", "prompt": "a"}, "--prompt must have at least one token, got 'a', which has no pairs"),
        ({"remat": "atention"}, "unknown remat policy 'atention'"),
        ({"override": ("ln_g=float32",)}, "ln_g"),
    ]:
        with pytest.raises((ValueError, DataError), match=message):
            language_modeling.prepare(dataclasses.replace(config, **{"override": (), **flags}))


def test_a_prompt_may_be_invalid_utf8_and_a_text_is_shown_without_control_characters(config, monkeypatch):
    monkeypatch.setattr(sampling, "sample", lambda apply, params, prompt, count, **options: [33])
    flags = text_training.settled(config, "gpt2")
    flags = dataclasses.replace(flags, prompt=b"to \xff".decode(errors="surrogateescape"))
    task = language_modeling.gpt2(flags, text_training.load(flags))
    assert task.closing(task.model, None, {"loss": 1.0}).texts["Sample"] == "to \ufffd!"

    assert loop._readable("ä☃\n\t\x1b[2J\x07\r\x85") == "ä☃\n\t\ufffd[2J\ufffd\ufffd\ufffd"


def test_only_matrices_decay_long_gradients_are_clipped_and_the_schedule_rises_and_falls(config):
    settled = dataclasses.replace(
        text_training.settled(config, "gpt2"), schedule="constant", learning_rate=0.1, weight_decay=0.5, clip=1.0
    )
    tx = text_training.adamw(settled)
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}

    @jax.jit
    def update(size):
        return tx.update(jax.tree.map(lambda p: size * p, params), tx.init(params), params)

    updates, _ = update(0.0)
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], 0)
    moments = [update(size)[1] for size in (1e3, 1e6)]
    np.testing.assert_allclose(moments[0][1][0].mu["w"], moments[1][1][0].mu["w"], rtol=1e-5)

    tx = text_training.adamw(dataclasses.replace(text_training.settled(config, "gpt2"), steps=100, weight_decay=0.0))
    params = jnp.zeros((1, 1))

    def step(state, _):
        update, state = tx.update(jnp.full((1, 1), 0.5), state, params)
        return state, -update[0, 0]

    sizes = np.asarray(jax.lax.scan(step, tx.init(params), length=101)[1])
    assert sizes[0] == 0 and np.argmax(sizes) == 5 and sizes[5] == pytest.approx(0.01, rel=1e-3)
    assert sizes[-1] == pytest.approx(0.001, rel=1e-3)


# --- sampling -------------------------------------------------------------------------------------------------------


def counting(params, window):
    """Predict the sum of the last two tokens modulo 7.

    Tokens before the window count as 0.
    """
    before = jnp.pad(window, ((0, 0), (1, 0)))[:, :-1]
    return params * jax.nn.one_hot((window + before) % 7, 7)


def test_a_sample_goes_on_from_its_prompt_through_a_window_that_moves():
    expected = [1, 2]
    for _ in range(20):
        expected.append((expected[-1] + expected[-2]) % 7)
    params = jnp.float32(50.0)
    assert sampling.sample(counting, params, [1, 2], 20, context=4, top_k=1) == expected[2:]
    assert sampling.sample(counting, params, [1, 2], 20, context=64, temperature=1.0) == expected[2:]
    assert sampling.sample(counting, params, [5, 6, 4, 1, 2], 20, context=3, temperature=0) == expected[2:]

    with pytest.raises(ValueError, match="a prompt of at least one token, got none; write --prompt"):
        sampling.sample(counting, jnp.float32(1.0), [], 3, context=4)


def test_tokens_are_drawn_by_temperature_among_the_likeliest():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(temperature: float, top_k: int) -> np.ndarray:
        draw = jax.jit(jax.vmap(lambda key: sampling.choose(key, logits, temperature, top_k)))
        return np.bincount(np.asarray(draw(keys)), minlength=4) / 4000

    np.testing.assert_allclose(shares(1.0, 0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    sharp = np.asarray([0.5, 0.3, 0.15, 0]) ** 2
    np.testing.assert_allclose(shares(0.5, 3), sharp / sharp.sum(), atol=0.03)


def test_bfloat16_params_that_are_rounded_stochastically_are_a_flag(config, tmp_path):
    config = dataclasses.replace(
        config, run_dir=tmp_path, policy="bfloat16_sr", low_precision="float8", override=(), steps=2, sample_tokens=0,
        loss_scale="none", evaluate_every=0, checkpoint_every=0,
    )  # fmt: skip
    experiment = language_modeling.prepare(config)
    state = jax.eval_shape(experiment.init, 0)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype.name for path, leaf in jax.tree.leaves_with_path(state.params)}
    assert {dtype for path, dtype in dtypes.items() if "ln_" in path} == {"float32"}
    assert {dtype for path, dtype in dtypes.items() if "ln_" not in path} == {"bfloat16"}
    after, _ = jax.eval_shape(experiment.step.jitted, state, next(experiment.train_batches(0)))
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)
