"""Published weights, with which the models agree with transformers in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import TOOLS
from safetensors.numpy import load_file, save_file

import jaxmp
from experiments import masked_lm
from experiments.models.bert import BERT
from experiments.models.gpt2 import GPT2
from experiments.models.weights import PUBLISHED_BERT, PUBLISHED_GPT2

SIZES = (41, 12, 2, 2, 16)  # as in tests/record_transformers.py
KINDS = {
    "gpt2": (GPT2, PUBLISHED_GPT2),
    "bert": (BERT, PUBLISHED_BERT),
}
Run = dict[str, np.ndarray]


@functools.cache
def recorded(kind: str) -> Run:
    with np.load(TOOLS / "transformers_models.npz") as file:
        return part({name: file[name] for name in file.files}, kind)


def part(run: Run, name: str) -> Run:
    return {key.removeprefix(f"{name}/"): value for key, value in run.items() if key.startswith(f"{name}/")}


def published(kind: str) -> Run:
    """Return the weights of the recorded run, in float32."""
    return {name: tensor.astype(np.float32) for name, tensor in part(recorded(kind), "weights").items()}


def errors(kind: str, run: Run, model: Any) -> dict[str, float]:
    """Return the largest errors of hidden state, loss and gradients.

    They are relative to the largest value of the array or of its module.
    """
    files = KINDS[kind][1]
    inputs = part(run, "inputs")
    targets = inputs.pop("targets")

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    def outputs(params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return model.apply({"params": params}, **inputs, targets=targets, ignore_index=-100, method="loss")

        return model.apply({"params": params}, **inputs, method="hidden"), *jax.value_and_grad(loss)(params)

    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm needs this in half precision
        hidden, loss, gradients = outputs(files.load(part(run, "weights")))
    assert {array.dtype for array in (hidden, loss, *jax.tree.leaves(gradients))} == {np.dtype(np.float32)}
    computed = {"hidden": hidden, "loss": loss} | files.tensors(gradients, vocabulary=SIZES[0])
    expected = {name: run[name] for name in ("hidden", "loss")}
    expected |= {name.removeprefix("transformer."): value for name, value in part(run, "gradients").items()}
    assert computed.keys() == expected.keys()
    # The error of a bias is relative to its kernel, because its gradient is a sum whose terms may cancel. The gradient
    # of the keys' bias is zero in exact numbers.
    scale: dict[str, float] = {}
    for name, value in expected.items():
        module = name.rpartition(".")[0] or name
        scale[module] = max(scale.get(module, 0.0), float(abs(value).max()))
    return {
        name: float(abs(np.asarray(computed[name], np.float64) - expected[name]).max())
        / scale[name.rpartition(".")[0] or name]
        for name in computed
    }


@pytest.mark.slow("runs the models of another library")
# In units of the compute dtype's rounding error, through two blocks and back. In float32 the largest error is that of
# the norms' variance, which Flax computes as E[x²] - E[x]². In half precision the variance is float32 too.
@pytest.mark.parametrize(("kind", "policy"), [("bert", "float32"), ("gpt2", "mixed_float16")])
def test_hidden_states_and_gradients_are_those_of_transformers_in_float64_to_rounding(kind, policy):
    eps = float(jnp.finfo(policy.removeprefix("mixed_")).eps)
    model = KINDS[kind][0](*SIZES)
    if policy != "float32":
        model = jaxmp.linen.apply_policy(model, policy)
    with jax.default_matmul_precision("highest"):
        largest_errors = errors(kind, recorded(kind), model)
    worst = max(largest_errors, key=largest_errors.__getitem__)
    assert largest_errors[worst] < (64 if policy == "float32" else 32) * eps, worst
    assert largest_errors["hidden"] < 8 * eps and largest_errors["loss"] < 2 * eps


def test_a_round_trip_through_a_file_changes_no_bit(tmp_path):
    for kind in KINDS:
        files = KINDS[kind][1]
        save_file(published(kind), tmp_path / "in.safetensors")
        params = files.load(tmp_path / "in.safetensors")
        files.save(params, tmp_path / "out.safetensors", vocabulary=SIZES[0])
        written = load_file(tmp_path / "out.safetensors")
        expected = {name.removeprefix("transformer."): tensor for name, tensor in published(kind).items()}
        assert written.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(written[name].view(np.int32), tensor.view(np.int32))
        again = files.load(files.tensors(params, vocabulary=SIZES[0]))
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, again))


def test_the_params_are_those_that_the_model_makes_and_rows_beyond_the_vocabulary_are_zeros():
    for kind in KINDS:
        model, files = KINDS[kind]
        shapes = jax.eval_shape(model(*SIZES).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        loaded = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), files.load(published(kind)))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), loaded
        )

    rows = PUBLISHED_GPT2.load(published("gpt2"))["wte"]["embedding"]
    assert rows.shape == (64, 16) and not rows[41:].any()


def test_names_of_other_times_and_tensors_without_a_use_are_understood():
    gpt2, bert = published("gpt2"), published("bert")
    old = {
        **{name.removeprefix("transformer."): tensor for name, tensor in gpt2.items()},
        "h.0.attn.bias": np.ones((1, 1, 12, 12), np.float32),
        "h.0.attn.masked_bias": np.float32(-1e4),
        "lm_head.weight": gpt2["transformer.wte.weight"],
    }
    assert same(PUBLISHED_GPT2.load(old), PUBLISHED_GPT2.load(gpt2))
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in bert.items()
    }
    older |= {
        "bert.pooler.dense.bias": np.ones(16, np.float32),
        "cls.seq_relationship.bias": np.ones(2, np.float32),
        "bert.embeddings.position_ids": np.arange(12)[None],
        "cls.predictions.decoder.weight": bert["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": bert["cls.predictions.bias"],
    }
    assert older.keys() - bert.keys() and same(PUBLISHED_BERT.load(older), PUBLISHED_BERT.load(bert))


def same(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), a, b))


def test_weights_and_files_that_are_not_a_models_are_refused_by_name(tmp_path):
    for change, message in [
        ({"h.1.mlp.c_fc.bias": None}, r"the weights of a GPT2 must have h\.1\.mlp\.c_fc\.bias too, which are missing"),
        (
            {"wpe.weight": None},
            r"the weights must have wpe\.weight, which gives the sizes; got h\.0\.attn\.c_attn\.bias",
        ),
        ({"h.0.ln_3.bias": np.ones(16)}, r"GPT2 has no place for h\.0\.ln_3\.bias; leave them out if that is right"),
        (
            {"h.0.mlp.c_fc.weight": np.ones((64, 16))},
            r"h\.0\.mlp\.c_fc\.weight must have shape \(16, 64\) to fit the other weights, got \(64, 16\)",
        ),
        (
            {"lm_head.weight": np.ones((41, 16))},
            r"lm_head\.weight must be the same as wte\.weight, because the model has one",
        ),
    ]:
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in published("gpt2").items()}
        tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        with pytest.raises(ValueError, match=message):
            PUBLISHED_GPT2.load(tensors)

    (tmp_path / "pytorch_model.bin").write_bytes(bytes(range(200)))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a complete safetensors file .*pickled by torch"):
        PUBLISHED_GPT2.load(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"one safetensors file, or its tensors by name, but .* is not a file"):
        PUBLISHED_BERT.load(tmp_path)

    with pytest.raises(ValueError, match=r"a vocabulary of 30522 has 30528 rows in decoder_bias, got 64"):
        PUBLISHED_BERT.save(PUBLISHED_BERT.load(published("bert")), tmp_path / "bert.safetensors", vocabulary=30522)


@pytest.mark.slow("trains with the weights of another library")
def test_a_script_begins_with_the_weights_of_a_file_and_writes_such_a_file(tmp_path):
    model, files = KINDS["bert"]
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    vocabulary = 258  # including [MASK]
    start = jax.jit(model(vocabulary, 24, 1, 2, 16).init)(jax.random.key(7), jnp.zeros((1, 2), jnp.int32))["params"]
    files.save(start, tmp_path / "in.safetensors", vocabulary=vocabulary)
    config = masked_lm.Config(
        dataset=str(tmp_path / "text.txt"), data_dir=tmp_path / "data", tokens="bytes", layers=1, heads=2, width=16,
        context=12, batch_size=4, steps=1, test_batches=1, policy="O2", weights=tmp_path / "in.safetensors",
        save_weights=tmp_path / "out.safetensors",
    )  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):
        experiment = masked_lm.prepare(config)
        state = experiment.init(3)
        expected = files.load_for(state.params, tmp_path / "in.safetensors")
        assert same(state.params, jax.tree.map(lambda array, param: array.astype(param.dtype), expected, state.params))
        experiment.closing(state, {"loss": 1.0})
        assert same(files.load(tmp_path / "out.safetensors"), jax.tree.map(np.float32, state.params))
        with pytest.raises(ValueError, match=r"must have the size of --weights, got .* for .*; give its --layers"):
            masked_lm.prepare(dataclasses.replace(config, width=32))


def test_transformers_itself_agrees_and_reads_what_is_saved(tmp_path):
    for kind in KINDS:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        import record_transformers

        run = record_transformers.record(kind, layers=3)
        model, files = KINDS[kind]
        with jax.default_matmul_precision("highest"):
            largest_errors = errors(kind, run, model(41, 12, 3, 2, 16))
        assert max(largest_errors.values()) < 128 * 2.0**-23
        theirs = record_transformers.published(kind, layers=3)
        theirs.config.save_pretrained(tmp_path)
        files.save(files.load(part(run, "weights")), tmp_path / "model.safetensors", vocabulary=41)
        read = type(theirs).from_pretrained(tmp_path).state_dict()
        for name, tensor in theirs.state_dict().items():
            np.testing.assert_array_equal(read[name].float().numpy(), tensor.float().numpy(), err_msg=name)
