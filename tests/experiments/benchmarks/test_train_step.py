"""The train step benchmark: models, precisions, flags, runs and figures."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmark_tools import SMALL, drawn, once

import jaxmp
from experiments.benchmarks.measure import processes
from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.models import by_hand
from experiments.benchmarks.models.workloads import FULL, NAMES, workload
from experiments.benchmarks.shared import measurements, scaled_steps
from experiments.benchmarks.train_step import config as train_step_config
from experiments.benchmarks.train_step import goals, jax_steps, measure, report
from experiments.benchmarks.train_step import run as train_step
from experiments.benchmarks.train_step.rows import CHUNKS, ROWS, Row, rows_of
from experiments.measure import flops
from jaxmp.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


# The models.

NAMES_IN_EXPERIMENTS = {
    "gpt2": {
        r"^embed/": "wte/",
        r"^positions/": "wpe/",
        r"^attention(\d+)/qkv": r"h_\1/attn/c_attn",
        r"^attention(\d+)/out": r"h_\1/attn/c_proj",
        r"^norm(\d)_(\d+)": r"h_\2/ln_\1",
        r"^up(\d+)": r"h_\1/mlp/c_fc",
        r"^down(\d+)": r"h_\1/mlp/c_proj",
        r"^norm/": "ln_f/",
    },
    "bert": {
        r"^embed/": "word_embeddings/",
        r"^positions/": "position_embeddings/",
        r"^types/": "token_type_embeddings/",
        r"^attention(\d+)/qkv": r"layer_\1/query_key_value",
        r"^attention(\d+)/out": r"layer_\1/attention_output",
        r"^norm1_(\d+)": r"layer_\1/attention_norm",
        r"^norm2_(\d+)": r"layer_\1/output_norm",
        r"^up(\d+)": r"layer_\1/intermediate",
        r"^down(\d+)": r"layer_\1/output",
        r"^norm/": "embeddings_norm/",
        r"^head/": "transform/",
        r"^head_norm": "transform_norm",
        r"^bias": "decoder_bias",
    },
    "resnet50": {
        r"^stem": "Conv_0",
        r"^norm/": "BatchNorm_0/",
        r"^dense": "Dense_0",
        r"^conv(\d)_(\d)_0": lambda m: f"Block_{m[2]}/Conv_{int(m[1]) - 1}",
        r"^norm(\d)_(\d)_0": lambda m: f"Block_{m[2]}/BatchNorm_{int(m[1]) - 1}",
    },
}


def in_experiments(name, tree):
    """Rename params by hand to the names in the models of the experiments."""
    flat = {}
    for key, value in flax.traverse_util.flatten_dict(tree, sep="/").items():
        new = key
        for pattern, replacement in NAMES_IN_EXPERIMENTS[name].items():
            if re.search(pattern, key):
                new = re.sub(pattern, replacement, key)
                break
        flat[new] = value
    return flax.traverse_util.unflatten_dict(flat, sep="/")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow("a part of a benchmark")
def test_the_models_by_hand_give_the_loss_of_those_of_the_experiments(name):
    case = workload(name, SMALL[name])
    model = by_hand.build(case)
    params, state = drawn(case, model)
    batch = case.random_batch()
    by_name = once(by_hand.loss_fn_of(model), params, state, batch, None)
    ours = in_experiments(name, params), {key: in_experiments(name, value) for key, value in state.items()}
    loss, new_state = once(case.loss_fn(), *ours, batch, None)
    assert float(loss) == pytest.approx(float(by_name[0]), rel=2e-6)
    expected = {key: in_experiments(name, value) for key, value in by_name[1].items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), new_state, expected)


def test_a_step_costs_three_times_the_products_of_the_forward_pass():
    case = workload("gpt2", SMALL["gpt2"])
    tokens, width, length = 2 * 8, 64, 8
    forward = 2 * tokens * (12 * width**2 + 64 * width) + 2 * 2 * tokens * length * width
    assert jax_steps.model_flops(case) == 3 * forward
    assert jax_steps.model_flops(workload("gpt2")) / 1e12 == pytest.approx(14.0, rel=0.01)


# The rows.


# float32 products without a precision have the device's default, which is TF32 on a GPU.
DTYPES = {"bf16": {"bfloat16"}, "fp16": {"float16"}, "tf32": {"tensorfloat32"}, "fp32": {"float32"}}
# Each other row differs from one of these only in the dtype or the loss scale.
ROWS_TRACED = ("jaxmp-bf16-remat", "flax-fp16", "jaxmp-tf32", "hand-tf32")


@pytest.mark.parametrize("key", ROWS_TRACED)
def test_a_row_multiplies_in_the_precision_of_its_name(key, monkeypatch):
    monkeypatch.setattr(flops, "count", functools.partial(flops.count, default_float32="default"))
    row, case = ROWS[key], workload("gpt2", SMALL["gpt2"])
    counted = jax_steps.step_flops(case, row)
    expected = {"default"} if key == "hand-tf32" else DTYPES[row.precision]
    assert {dtype for dtype, flops_ in counted.items() if flops_} == expected
    more = sum(counted.values()) / jax_steps.model_flops(case)
    assert more > 1.05 if row.remat != "none" else more == pytest.approx(1, abs=0.02)


def test_a_row_splits_the_cross_entropy_into_its_chunks():
    case = workload("gpt2", SMALL["gpt2"])
    loops = []
    for key in CHUNKS:
        start, step = jax_steps.train_step(case, ROWS[key])
        program = str(jax.make_jaxpr(step.train)(jax.eval_shape(start), case.batch))
        loops += [int(length) for length in re.findall(r"length=(\d+)", program)]
    assert loops == [1, 2, 4, 8]


def test_the_constant_scale_is_the_first_of_the_dynamic_scale_with_finite_gradients():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params).astype(jnp.float16)).astype(jnp.float32), model_state

    assert jaxmp.DynamicLossScale().loss_scale == scaled_steps.INITIAL_SCALE
    args = loss_fn, optax.sgd(1e-10), lambda key: (jnp.ones(3), None)
    batch = np.full((1, 3), 16, np.float32)  # the scaled gradients are 16 times the scale, cast to float16
    half = jax.jit(lambda state, batch: step(state, batch.astype(jnp.float16)))

    def with_half_gradients(params, model_state, batch, rng):
        return loss_fn(params.astype(jnp.float16), model_state, batch, rng)

    start, step = scaled_steps.with_constant_scale(with_half_gradients, *args[1:])
    *_, scale = scaled_steps.settled(start, half, batch)
    dynamic_start, dynamic_step = scaled_steps.with_jaxmp(with_half_gradients, *args[1:])
    state = dynamic_start()
    for _ in range(5):
        state, _ = dynamic_step(state, batch.astype(np.float16))
    assert scale == jaxmp.get_loss_scale(state[1]).loss_scale == 2**11
    with pytest.raises(FloatingPointError, match="even without a scale"):
        scaled_steps.settled(start, half, np.full((1, 3), np.inf, np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow("compiles a step")
def test_a_steps_loss_stays_where_it_begins(name):
    case = workload(name, SMALL[name])
    prepared = jax_steps.prepare(case, ROWS["hand-bf16"], case.random_batch())
    losses = [prepared.loss() for _ in range(20)]
    assert losses == pytest.approx([losses[0]] * 20, rel=1e-4)
    assert losses[0] == pytest.approx(np.log(case.sizes.vocabulary), rel=0.5)


def test_the_rows_of_jaxmp_are_steps_of_make_train_step_but_those_without_dynamic_scaling_in_fp16():
    for key in (key for key in ROWS if ROWS[key].library in ("jaxmp", "autocast")):
        _, step = jax_steps.train_step(workload("gpt2", SMALL["gpt2"]), ROWS[key])
        assert isinstance(step, jax_steps.Made) == (key not in ("jaxmp-fp16-unscaled", "jaxmp-fp16-constant")), key


def test_a_step_with_a_constant_scale_computes_what_a_step_without_scaling_computes():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params) ** 2), model_state

    batch, results = np.arange(6, dtype=np.float32).reshape(2, 3), []
    for make in (scaled_steps.no_scaling, scaled_steps.with_constant_scale):
        start, step = make(loss_fn, optax.sgd(0.1), lambda key: (jnp.ones(3), None))
        (params, *_), loss = step(start(), batch)
        results.append((np.asarray(params), float(loss)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] and not np.array_equal(results[0][0], np.ones(3))


@pytest.mark.parametrize("is_train_step", [True, False])
def test_a_turn_is_the_call_that_a_user_makes_and_is_compiled_once(is_train_step, monkeypatch):
    def loss_fn(params, model_state, batch, rng=None):
        return jnp.mean((params["w"] - batch) ** 2), model_state

    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: loss_fn({"w": w}, None, batch)[0])(w)
        return w - 0.1 * grad, loss

    called, compiled = [], []
    kind = TrainStep
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *args: called.append(1) or call(self, *args))
    tx = optax.sgd(0.1)

    def start():
        return jaxmp.TrainState.create(params={"w": jnp.ones(3)}, tx=tx) if is_train_step else jnp.ones(3)

    row_step = jax_steps.Made(jaxmp.make_train_step(loss_fn)) if is_train_step else step
    monkeypatch.setattr(jax_steps, "train_step", lambda case, row: (start, row_step))
    prepared = jax_steps.prepare(workload("gpt2", SMALL["gpt2"]), ROWS["jaxmp-bf16"], jnp.zeros(3))
    assert not called and prepared.compile_seconds > 0 and prepared.compiled_bytes > 0

    def listen(event, duration, **_):
        compiled.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        losses = [prepared.loss(), prepared.loss()]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert losses == pytest.approx([1.0, (1 - 0.2 / 3) ** 2]) and len(called) == (2 if is_train_step else 0)
    assert not compiled


@pytest.mark.slow("traces every peer")
def test_steps_of_peers_give_a_state_for_the_next_one():
    case = workload("resnet50", SMALL["resnet50"])
    init, step = jax_steps.train_step(case, ROWS["flax-fp16"])
    state = jax.eval_shape(init)
    new, loss = jax.eval_shape(step, state, case.batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert any("mean" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(new))

    init, step = jax_steps.train_step(case := workload("gpt2", SMALL["gpt2"]), ROWS["jmp-fp16"])
    state = jax.eval_shape(init)
    lowered = jax.jit(step, donate_argnums=0).lower(state, case.batch)
    new, _ = lowered.out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert "f16" in lowered.as_text()
    assert {*jax_steps.step_flops(case, ROWS["jmp-bf16"])} == {"bfloat16"}  # by jmp's policy, without a dtype


def test_rows_are_chosen_by_name_and_know_what_they_need(monkeypatch):
    assert list(rows_of("gpt2", ("hand-fp16", "jaxmp-bf16"))) == ["jaxmp-bf16", "hand-fp16"]
    assert set(rows_of("gpt2")) - set(rows_of("resnet50")) == {
        key for key in ROWS if re.search("remat|chunk|-auto$", key)
    }
    with pytest.raises(ValueError, match=r"--rows must be among jaxmp-bf16, .*; got fp8"):
        rows_of("gpt2", ("fp8",))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert {key for key, row in ROWS.items() if row.missing} == {
        key for key in ROWS if key.startswith(("torch", "compile", "jmp"))
    }
    assert Row("x", "jaxmp", "bf16").missing is None


def test_a_bad_flag_ends_the_benchmark_with_one_line(capsys):
    for config, text in [
        (train_step.Config(), "this benchmark needs a GPU, but JAX finds only cpu"),
        (train_step.Config(smoke=True, rows=("apex",)), "--rows must be among"),
        (train_step.Config(smoke=True, rounds=0), "--rounds must be at least 1, got 0"),
        (train_step.Config(smoke=True, energy_s=-1), "--energy-s must be at least 0, got -1"),
        (train_step.Config(report_only=True), "--report-only reads results from --run-dir"),
        (train_step.Config(smoke=True, block_ms=float("nan")), "--block-ms must be at least 0.1, got nan"),
        (train_step.Config(smoke=True, models=()), "the number of --models must be at least 1, got 0"),
        (train_step.Config(alone="hand-bf16"), "--alone needs a single model, got --models resnet50 bert gpt2"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train_step.main(config)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and text in said and said.count("\n") == 1


# Runs. Compiling is replaced, and the timed steps do nothing.


@pytest.fixture
def quick(monkeypatch):
    """Replace the steps by empty ones, and return the rows that were prepared."""
    prepared = []

    def prepare(case, row):
        prepared.append(row.label)
        if row.library == "flax" and len(prepared) < 3:
            raise RuntimeError("no such kernel")
        return Prepared(lambda: None, lambda: 2.5, 1.5, 2**20)

    monkeypatch.setattr(measure, "prepare", prepare)
    monkeypatch.setattr(train_step_config, "SMOKE", SMALL)
    monkeypatch.setattr(report.plots, "panels", lambda *_: None)
    return prepared


def test_a_run_writes_its_table_continues_and_tries_failed_rows_again(quick, tmp_path, capsys):
    config = train_step.Config(smoke=True, models=("gpt2",), rows=("hand-bf16", "flax-fp16"), run_dir=tmp_path)
    with pytest.raises(SystemExit, match="1"):  # a smoke test
        train_step.main(config)
    assert "every row must run, but flax-fp16 did not" in capsys.readouterr().err
    assert "RuntimeError: no such kernel" in (tmp_path / "train_step.md").read_text()
    results = train_step.main(config)["gpt2"]
    assert results.failed() == [] and results.figures("flax-fp16")["compiled_bytes"] == 2**20
    assert results.ratio("hand-bf16", "flax-fp16") is not None
    before = len(quick)
    train_step.main(dataclasses.replace(config, report_only=True))
    train_step.main(config)
    assert len(quick) == before
    with pytest.raises(SystemExit, match="2"):
        train_step.main(dataclasses.replace(config, rounds=3))
    assert "rounds is 20 there and 3 here" in capsys.readouterr().err


def test_without_time_rows_are_left_to_the_next_command(quick, tmp_path, capsys):
    config = train_step.Config(smoke=True, models=("gpt2",), rows=("hand-bf16",), run_dir=tmp_path, minutes=1e-9)
    assert train_step.main(config) == {} and not quick
    assert capsys.readouterr().out == f"{measurements.UNFINISHED}\n"


def test_each_row_is_measured_in_a_new_process_and_one_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    program = "import json, sys, time; sys.stdin.readline(); {}; print('noise'); print(json.dumps(dict(said='A')))"
    bodies = {"a": "pass", "b": "sys.exit('no room')", "c": "time.sleep(999)", "d": "pass"}
    commands = {row: [sys.executable, "-S", "-c", program.format(body)] for row, body in bodies.items()}
    results = {row: find() for row, find in processes.in_processes(commands)}
    assert results["a"] == results["d"] == {"said": "A"}
    assert results["b"] == {"error": "its process ended with code 1: no room"}
    assert results["c"] == {"error": "its process had not ended after 0.5 s"}


# Figures.


def results_of(**rows):
    """Return results of GPT-2 with the milliseconds and MiB of each row."""
    about = {"model": "gpt2", "text": "GPT-2", "sizes": dataclasses.asdict(FULL["gpt2"]), "items": 1000,
             "unit": "tokens", "setting": {"smoke": False}, "model_flops": 2e12}  # fmt: skip
    rows = {name.replace("_", "-"): value for name, value in rows.items()}
    turns = {name: {"milliseconds": [ms, ms, ms]} for name, (ms, _) in rows.items()}
    flop_figures = {"tensor_flops": 0.995, "flops": {"float16": 985, "tensorfloat32": 10, "float32": 5}}
    alone = {name: {"peak": mib * 2**20, **flop_figures} for name, (_, mib) in rows.items()}
    return report.Results(about, alone, [turns])


def test_goals_are_met_or_not_with_their_figures_against_the_faster_dtype_of_the_peer():
    results = results_of(
        jaxmp_bf16=(30, 70), jaxmp_fp16=(31, 70), jaxmp_fp16_constant=(30, 70), jaxmp_bf16_remat=(32, 40),
        autocast_bf16=(30.5, 71), unprepared_bf16=(30.5, 101), hand_bf16=(30.4, 100),
        compile_bf16=(33, 100), compile_fp16=(32, 80),
        jaxmp_fp32=(270, 300), hand_fp32=(330, 400), jaxmp_tf32=(96, 300),
    )  # fmt: skip
    figures = {goal.key: round(goal.value, 3) for goal in goals.goals(results)}
    assert figures == {
        "time": 0.938, "memory": 0.875, "remat_memory": 0.5, "remat_time": 1.0, "over_fp32": 9.0, "over_tf32": 3.2,
        "saved": 0.825, "scaling": 1.033, "autocast_by_hand": 1.003, "autocast": 1.017, "half": 0.985,
    }  # fmt: skip
    assert goals.sentences(results)[1] == (
        "met: peak memory of jaxmp, bf16 / torch.compile AMP, fp16, GradScaler is 0.875, the goal at most 1"
    )
    missing = goals.sentences(results_of(jaxmp_bf16=(30, 70)))
    assert sum(line.startswith("not measured") for line in missing) == 10


def test_the_fastest_setting_needs_at_most_the_memory_of_torch_compile_if_any_does():
    rows = {"jaxmp_bf16": (30, 70), "jaxmp_bf16_2chunks": (29, 98), "jaxmp_bf16_1chunk": (28, 110)}
    assert goals.fastest_setting(results_of(compile_bf16=(32, 100), **rows)) == "jaxmp-bf16-2chunks"
    assert goals.fastest_setting(results_of(compile_bf16=(32, 60), **rows)) == "jaxmp-bf16-1chunk"
    assert goals.fastest_setting(results_of(**rows)) == "jaxmp-bf16-1chunk"


def test_rows_are_not_judged_if_their_loss_moved_or_is_not_near_the_others():
    results = results_of(jaxmp_bf16=(30, 70), jaxmp_fp16=(31, 70), hand_bf16=(32, 70), compile_bf16=(33, 100))
    losses = {"jaxmp-bf16": (10.8, 10.7), "jaxmp-fp16": (10.8, 9.0), "hand-bf16": (3.0, 3.0), "compile-bf16": (11, 11)}
    for row, (before, after) in losses.items():
        results.turns[0][row] |= {"loss_before": before, "loss": after}
    errors = {row: results.figures(row).get("error") for row in losses}
    assert errors == {
        "jaxmp-bf16": None,
        "jaxmp-fp16": "not judged: its loss moved from 10.8 to 9 while it was timed",
        "hand-bf16": "not judged: its loss is 3, and that of the other rows is 10.7",
        "compile-bf16": None,
    }
    assert results.ratio("jaxmp-bf16", "compile-bf16") is not None
    assert results.ratio("jaxmp-fp16", "compile-bf16") is None
    results.turns[0]["compile-bf16"]["loss"] = "nan"  # nan is a string in JSON
    assert results.memory("compile-bf16") is None


def test_the_table_has_times_memory_and_joules_and_why_a_row_failed():
    results = results_of(jaxmp_bf16=(30, 70), hand_fp32=(300, 400))
    del results.turns[0]["hand-fp32"]
    results.alone["hand-fp32"] = {"error": "out of memory"}
    power = {"watts": 690.4, "sm_clock": 1500.0, "throttled": {"power limit": 0.83}}
    results.alone["jaxmp-bf16"] |= {"joules": 25.71, "power": power, "compiled_bytes": 2**21}
    ours, failed = report.table(results).rows
    assert failed == ("JAX by hand, fp32", "out of memory")
    assert dict(zip(report.COLUMNS, ours, strict=True)) | {"/ torch.compile": ""} == {
        "row": "jaxmp, bf16", "ms": "30", "quartiles": "30 to 30", "/ torch.compile": "", "{unit}/s": "33,333",
        "peak MiB": "70.0", "program MiB": "2.0", "FLOPs on tensor cores": "99.5%", "J per call": "25.7", "W": "690",
        "SM MHz": "1500", "clocks lowered by": "power limit 83%", "loss": "", "compile s": "",
    }  # fmt: skip
    results.turns.append({"jaxmp-bf16": {"milliseconds": [20, 20, 20]}})
    assert results.figures("jaxmp-bf16")["ms"] == (20, 20, 20)
