"""The benchmark of train steps compares the same models, each in the precision that it names, and tells it straight."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import re
import sys
import types
from collections import namedtuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import (
    by_hand,
    energy,
    jax_steps,
    profiling,
    train_step,
    train_step_goals,
    train_step_sweeps,
)
from experiments.benchmarks import train_step_measure as measure
from experiments.benchmarks import train_step_report as report
from experiments.benchmarks.train_step_rows import ROWS, Prepared, Row, rows_of
from experiments.benchmarks.workloads import FULL, NAMES, Sizes, workload

# Vocabularies that are multiples of 64: padding would be tokens by hand and none in the models of the experiments.
SMALL = {
    "resnet50": Sizes(2, 32, layers=1, width=8, vocabulary=10),
    "bert": Sizes(2, 8, layers=1, width=64, vocabulary=64),
    "gpt2": Sizes(2, 8, layers=1, width=64, vocabulary=64),
}
PARAMS = {"resnet50": 25_557_032, "bert": 109_518_912, "gpt2": 124_475_904}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        yield


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
    """Params by hand under the names of the models of the experiments."""
    flat = {}
    for key, value in flax.traverse_util.flatten_dict(tree, sep="/").items():
        new = key
        for pattern, replacement in NAMES_IN_EXPERIMENTS[name].items():
            if re.search(pattern, key):
                new = re.sub(pattern, replacement, key)
                break
        flat[new] = value
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def drawn(case, model):
    """Variables drawn at random: scales of 1 and biases of 0 would hide what they multiply."""
    shapes = jax.eval_shape(functools.partial(by_hand.init, case, model), jax.random.key(0))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        start = float(path[-1].key in ("scale", "var"))
        return jnp.asarray(start + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", NAMES)
def test_the_models_by_hand_have_as_many_params_as_those_of_the_experiments(name):
    case = workload(name)
    ours, _ = jax.eval_shape(case.init, jax.random.key(0))
    theirs, _ = jax.eval_shape(lambda key: by_hand.init(case, by_hand.build(case), key), jax.random.key(0))
    assert count(ours) == count(theirs) == PARAMS[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_models_by_hand_give_the_loss_of_those_of_the_experiments(name):
    case = workload(name, SMALL[name])
    model = by_hand.build(case)
    params, state = drawn(case, model)
    batch = case.random_batch()
    by_name = jax.jit(by_hand.loss_fn_of(model))(params, state, batch, None)
    ours = in_experiments(name, params), {key: in_experiments(name, value) for key, value in state.items()}
    loss, new_state = jax.jit(case.loss_fn())(*ours, batch, None)
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


@pytest.mark.parametrize(
    "key", [key for key in ROWS if not ROWS[key].torch and key not in ("hand-fp16", "autocast-fp16")]
)
def test_a_row_multiplies_in_the_precision_that_it_names(key):
    row, case = ROWS[key], workload("gpt2", SMALL["gpt2"])
    counted = jax_steps.step_flops(case, row)
    expected = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tensorfloat32", "fp32": "float32"}[row.precision]
    if key == "hand-tf32":  # no precision in its code: TF32 is what a GPU makes of it
        expected = "float32"
    assert {dtype for dtype, flops_ in counted.items() if flops_} == {expected}
    more = sum(counted.values()) / jax_steps.model_flops(case)
    assert more > 1.05 if row.remat != "none" else more == pytest.approx(1, abs=0.02)
    if row.forward:
        init, forward = jax_steps.forward(case, row)
        logits = jax.eval_shape(forward, jax.eval_shape(init), case.batch["inputs"])
        assert logits.shape == (2, 8, 64) and logits.dtype == {"bf16": "bfloat16", "fp16": "float16"}.get(
            row.precision, "float32"
        )


@pytest.mark.parametrize("key", ["jaxmp-fp16", "jmp-fp16", "flax-fp16"])
def test_a_step_gives_a_state_for_the_next_one_with_running_statistics_in_it(key):
    case = workload("resnet50", SMALL["resnet50"])
    init, step = jax_steps.train_step(case, ROWS[key])
    state = jax.eval_shape(init)
    new, loss = jax.eval_shape(step, state, case.batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert any("mean" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(new))


def test_jmps_step_can_be_lowered():
    init, step = jax_steps.train_step(case := workload("gpt2", SMALL["gpt2"]), ROWS["jmp-fp16"])
    assert "f16" in jax.jit(step, donate_argnums=0).lower(jax.eval_shape(init), case.batch).as_text()


def test_rows_are_chosen_by_name_and_remat_is_the_transformers():
    assert list(rows_of("gpt2", ("hand-fp16", "jaxmp-bf16"))) == ["jaxmp-bf16", "hand-fp16"]
    assert set(rows_of("gpt2")) - set(rows_of("resnet50")) == {"jaxmp-bf16-remat"}
    with pytest.raises(ValueError, match=r"--rows must be among jaxmp-bf16, .*; got fp8"):
        rows_of("gpt2", ("fp8",))


# Profiles and energy.


@pytest.mark.parametrize(
    ("kernel", "half", "fp32"),
    [
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNN", True, True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", True, True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", True, True),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", True, True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128", True, True),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", True, False),
        ("gemm_fusion_dot_42", True, False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", False, False),
        ("ampere_sgemm_128x64_nn", False, False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", False, False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", False, False),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<...>", False, False),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__half>", False, False),
        ("triton_poi_fused_convolution_relu_3", False, False),
        ("triton_red_fused__scaled_dot_product_flash_attention_2", False, False),
        ("loop_convert_fusion_7", False, False),
        ("input_reduce_fusion", False, False),
        ("MemcpyD2D", False, False),
    ],
)
def test_kernels_with_tensor_cores_are_told_by_their_names(kernel, half, fp32):
    assert profiling.uses_tensor_cores(kernel) == half
    assert profiling.uses_tensor_cores(kernel, "fp32") == fp32


def test_a_traces_kernels_are_those_in_the_streams_of_gpus():
    Named, Event = namedtuple("Named", "name planes lines events"), namedtuple("Event", "name duration_ns")
    kernels = [Event("nvjet_hsh", 2e6), Event("loop_add", 1e6), Event("nvjet_hsh", 1e6)]
    lines = [Named("Stream #7(Compute)", 0, 0, kernels), Named("XLA Ops", 0, 0, [Event("dot.3", 9e6)])]
    planes = [Named("/device:GPU:0", 0, lines, 0), Named("/host:CPU", 0, lines, 0)]
    found = profiling.kernels_of(types.SimpleNamespace(planes=planes))
    assert found == {"nvjet_hsh": 3.0, "loop_add": 1.0}
    assert profiling.tensor_core_share(found) == 0.75
    assert profiling.longest(found, 1) == [("nvjet_hsh", 3.0)]


def test_a_trace_of_a_cpu_has_no_kernels_and_no_share():
    fun = jax.jit(lambda x: x @ x)
    assert profiling.of_jax(lambda: fun(jnp.ones((4, 4))), calls=1) == {}
    assert profiling.tensor_core_share({}) is None


def test_energy_is_what_the_counter_moved_divided_by_the_calls():
    calls = []
    used = energy.joules(lambda: calls.append(1), lambda: 100.0 + 0.5 * len(calls), seconds=0.01)
    assert used == pytest.approx(0.5) and calls


def test_energy_is_read_in_joules_by_index_or_name_and_not_at_all_without_nvml(monkeypatch):
    class NVMLError(Exception):
        pass

    def total(handle):
        if handle == "GPU-old":
            raise NVMLError("not supported")
        return 2500 if handle == 3 else 7000

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda name: name,
        "nvmlDeviceGetTotalEnergyConsumption": total,
        "NVMLError": NVMLError,
    }
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**functions))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert energy.counter()() == 2.5
    assert energy.counter("GPU-1234")() == 7.0
    assert energy.counter("GPU-old") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: types.SimpleNamespace())
    assert energy.counter() is None


# Measuring.


def test_each_row_is_measured_in_a_process_of_its_own_in_order(tmp_path):
    def command(body):
        return [sys.executable, "-c", f"import json, sys; sys.stdin.readline(); {body}"]

    def says(text):
        return command(f"print('noise'); print(json.dumps(dict(said={text!r})))")

    commands = {"a": says("A"), "b": command("sys.exit('no room')"), "c": says("C"), "d": says("D")}
    found = {}
    for name, measured in (rows := measure.in_processes(commands)):
        if name == "d":
            rows.close()  # nobody waits for the last one: it is ended
            break
        found[name] = measured()
    assert found == {
        "a": {"said": "A"},
        "b": {"error": "its process ended with code 1: no room"},
        "c": {"said": "C"},
    }


def test_a_process_answers_with_its_findings_once_it_may(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(readline=lambda: "go\n"))
    measure.answer(lambda: {"loss": float("nan"), "peak": None})
    assert json.loads(capsys.readouterr().out) == {"loss": "nan", "peak": None}


def test_a_row_without_room_says_the_largest_batch_that_fits(monkeypatch):
    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 3 bytes")

    monkeypatch.setattr(measure, "prepare", no_room)
    monkeypatch.setattr(measure, "free_bytes", lambda: 1000)
    monkeypatch.setattr(jax_steps, "compiled_bytes", lambda case, row: 30 * case.sizes.batch_size)
    found = measure.alone(workload("gpt2"), ROWS["jaxmp-bf16"], ("train", "forward"), "default", 0.0)
    assert found == {
        "train": {"error": "out of memory; the largest batch that fits is 16"},
        "forward": {"error": "out of memory"},
    }
    prepared, errors = measure.prepare_all(
        workload("gpt2"), {"hand-fp32": ROWS["hand-fp32"]}, "train", "default", lambda _: None
    )
    assert prepared == {} and errors == {"hand-fp32": "out of memory"}
    assert measure.reason(RuntimeError("no kernel\nfor that")) == "RuntimeError: no kernel"


# Runs. What compiles is replaced: what is timed are sleeps of nothing.


@pytest.fixture
def quick(monkeypatch):
    """Steps that do nothing, and a few small products."""

    def prepare(case, row, which, mode="default"):
        if row.library == "flax":
            raise RuntimeError("no such kernel")
        return Prepared(lambda: None, (lambda: 2.5) if which == "train" else None, 1.5, 2**20)

    monkeypatch.setattr(measure, "prepare", prepare)
    monkeypatch.setattr("gc.collect", lambda: 0)  # seconds each beside the other tests
    monkeypatch.setattr(train_step, "SMOKE", SMALL)
    monkeypatch.setattr(train_step_sweeps, "SMOKE", SMALL)
    monkeypatch.setattr(train_step.ceiling, "SMOKE_SHAPES", ((8, 8, 8),))


def test_a_run_writes_tables_a_picture_and_all_figures(quick, tmp_path, capsys):
    rows = ("jaxmp-bf16", "flax-fp16", "hand-fp32")
    train_step.main(train_step.Config(smoke=True, models=("gpt2",), rows=rows, run_dir=tmp_path))
    written = json.loads((tmp_path / "train_step.json").read_text())
    model = written["models"]["gpt2"]
    assert len(model["train"]["jaxmp-bf16"]["milliseconds"]) == 2 and model["train"]["jaxmp-bf16"]["loss"] == 2.5
    assert model["train"]["jaxmp-bf16"]["tensor_flops"] == 1.0 and model["train"]["hand-fp32"]["tensor_flops"] == 0.0
    assert model["train"]["flax-fp16"]["error"] == "RuntimeError: no such kernel"
    assert "loss" not in model["forward"]["jaxmp-bf16"]
    assert model["goals"] == ["The goals are for the sizes of the field: not judged here."]
    assert set(written["ceiling"]["best"]) == {"float32", "bfloat16", "float16"}
    markdown, printed = (tmp_path / "train_step.md").read_text(), capsys.readouterr().out
    for text in (
        "the train step",
        "the forward pass alone",
        "jaxmp, bf16",
        "RuntimeError: no",
        "1.0 c",
        "device:",
    ):
        assert text in markdown and text in printed
    assert (tmp_path / "train_step.png").stat().st_size > 5000


def test_what_is_not_installed_says_so(quick, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torch" else find_spec(name))
    rows = ("jaxmp-fp32", "compile-bf16")
    train_step.main(train_step.Config(smoke=True, models=("bert",), rows=rows, passes=("train",), run_dir=tmp_path))
    markdown = (tmp_path / "train_step.md").read_text()
    assert "| torch.compile AMP, bf16 | not installed: torch |" in markdown
    assert "| jaxmp, fp32 | " in markdown and "the forward pass alone" not in markdown


def test_a_run_that_was_cut_goes_on_where_it_stopped(quick, monkeypatch, tmp_path):
    started, late = [], {"after": 1}

    def in_processes(commands):
        for key, command in commands.items():
            assert command[command.index("--alone") + 1] == key
            passes = command[command.index("--passes") + 1 :]
            yield key, lambda key=key, passes=passes: started.append(key) or {name: {"joules": 1} for name in passes}

    monkeypatch.setattr(train_step.measure, "in_processes", in_processes)
    monkeypatch.setattr(train_step.ceiling, "require_gpu", lambda _: None)
    monkeypatch.setattr(report, "picture", lambda *_: None)
    monkeypatch.setattr(train_step, "FULL", SMALL)
    monkeypatch.setattr(train_step.Measurement, "_late", lambda self, _: self._mark(len(started) >= late["after"]))
    monkeypatch.setattr(
        train_step.Measurement, "_mark", lambda self, cut: setattr(self, "unfinished", cut) or cut, raising=False
    )
    (tmp_path / "ceiling.json").write_text("{}")
    rows = ("jaxmp-bf16", "hand-bf16")
    config = train_step.Config(models=("gpt2",), rows=rows, passes=("train",), rounds=2, block_ms=1, run_dir=tmp_path)
    train_step.main(config)
    assert started == ["jaxmp-bf16"] and not list(tmp_path.glob("together-*"))
    late["after"] = 9
    results = train_step.main(config)
    assert started == ["jaxmp-bf16", "hand-bf16"]  # the first is not measured again
    assert results["gpt2"].ratio("train", "jaxmp-bf16", "hand-bf16") is not None
    (file,) = tmp_path.glob("together-*")
    before = file.stat().st_mtime_ns
    train_step.main(config)
    assert file.stat().st_mtime_ns == before and len(started) == 2
    train_step.main(dataclasses.replace(config, passes=("train", "forward"), rows=rows[:1]))
    assert started[2:] == ["jaxmp-bf16"]  # for the forward pass, and the train step's figures stay
    assert set(json.loads((tmp_path / "alone-gpt2-jaxmp-bf16.json").read_text())) >= {"train", "forward"}
    with pytest.raises(SystemExit):
        train_step.main(dataclasses.replace(config, batch_size=4))


def test_the_time_that_is_left_decides_whether_something_starts(quick, monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(train_step.time, "monotonic", lambda: now[0])
    measurement = train_step.Measurement(train_step.Config(minutes=8), tmp_path)
    now[0] = 7 * 60.0
    assert not measurement._late(59) and not measurement.unfinished
    assert measurement._late(61) and measurement.unfinished


def test_a_real_row_runs_from_the_command_to_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(train_step, "SMOKE", SMALL)
    monkeypatch.setattr(train_step.ceiling, "SMOKE_SHAPES", ((8, 8, 8),))
    rows = ("hand-fp32",)
    config = train_step.Config(smoke=True, models=("gpt2",), rows=rows, passes=("forward",), run_dir=tmp_path)
    figures = train_step.main(config)["gpt2"].figures("forward", "hand-fp32")
    assert figures["compiled_bytes"] > 1e5 and figures["compile_seconds"] > 0 and len(figures["milliseconds"]) == 2


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (train_step.Config(), "this benchmark measures a GPU, but JAX finds only cpu"),
        (train_step.Config(smoke=True, rows=("apex",)), "--rows must be among"),
        (train_step.Config(smoke=True, rounds=0), "--rounds must be at least 1, got 0"),
        (train_step.Config(report_only=True), "--report-only reads what lies in --run-dir"),
    ],
)
def test_a_bad_flag_ends_the_benchmark_with_one_line(config, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_step.main(config)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and text in said and said.count("\n") == 1


def test_the_sweeps_say_where_half_precision_pays(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_step_sweeps, "_gain", lambda base, own: (1.0, 1.5, 2.0))
    for axis, values in (("width", "128, 64"), ("depth", "2, 1")):
        train_step.main(train_step.Config(smoke=True, models=("gpt2", "resnet50"), sweep=axis, run_dir=tmp_path))
        assert f"jaxmp, bf16: pays at {axis} {values}" in capsys.readouterr().out
        points = json.loads((tmp_path / f"train_step_{axis}.json").read_text())["models"]["gpt2"]["points"]
        assert [str(point["value"]) for point in points] == values.split(", ")


def test_the_step_is_timed_with_idle_cores_and_with_busy_ones(quick, tmp_path, monkeypatch):
    seen = []
    together = measure.together
    monkeypatch.setattr(
        measure, "together", lambda *args: seen.append(len(multiprocessing.active_children())) or together(*args)
    )
    monkeypatch.setattr(train_step_sweeps.os, "cpu_count", lambda: 1)
    train_step.main(train_step.Config(smoke=True, models=("bert",), rows=("jaxmp-bf16",), busy=True, run_dir=tmp_path))
    assert seen == [0, 1] and multiprocessing.active_children() == []
    assert "busy / idle" in (tmp_path / "train_step_busy.md").read_text()


# The report.


def results_of(**rows):
    """Results of GPT-2 from a row's milliseconds and MiB."""
    about = {
        "model": "gpt2",
        "text": "GPT-2",
        "sizes": dataclasses.asdict(FULL["gpt2"]),
        "items": 1000,
        "unit": "tokens",
    }
    rows = {name.replace("_", "-"): value for name, value in rows.items()}
    turns = {name: {"milliseconds": [ms, ms, ms]} for name, (ms, _) in rows.items()}
    alone = {name: {"train": {"peak": mib * 2**20, "tensor_flops": 0.995}} for name, (_, mib) in rows.items()}
    return report.Results({**about, "model_flops": 2e12}, alone, {"train": [turns]}, {"best": {"bfloat16": 400.0}})


def test_goals_are_met_or_not_with_their_figures_against_the_faster_dtype_of_the_peer():
    results = results_of(
        jaxmp_bf16=(30, 70), jaxmp_fp16=(31, 70), jaxmp_fp16_unscaled=(30, 70), jaxmp_bf16_remat=(32, 50),
        autocast_bf16=(30.5, 71), hand_bf16=(30.4, 100), compile_bf16=(33, 100), compile_fp16=(32, 80),
        jaxmp_fp32=(270, 300), hand_fp32=(330, 400), jaxmp_tf32=(96, 300),
    )  # fmt: skip
    assert train_step_goals.goals(results) == [
        "NOT MET: step time of jaxmp, bf16 / torch.compile AMP, fp16, GradScaler is 0.938, the goal at most 0.93",
        "NOT MET: peak memory of jaxmp, bf16 / torch.compile AMP, fp16, GradScaler is 0.875, the goal at most 0.82",
        "NOT MET: peak memory with remat / torch.compile AMP is 0.625, the goal at most 0.62",
        "met: step time with remat / without is 1.067, the goal at most 1.08",
        "NOT MET: speed-up over the same step in fp32 without tensor cores (11.00 over JAX by hand, fp32) is 9.00, "
        "the goal at least 10",
        "met: speed-up over the same step in TF32 is 3.20, the goal at least 3.2",
        "met: memory saved against float32 by hand is 0.82, the goal at least 0.75",
        "NOT MET: fp16 with dynamic scaling / without is 1.033, the goal at most 1.005",
        "met: autocast of the float32 model / by hand, bf16 (1.017 of jaxmp, bf16) is 1.003, the goal at most 1.01",
        "met: share of FLOPs on tensor cores in half is 0.995, the goal at least 0.99",
    ]
    missing = train_step_goals.goals(results_of(jaxmp_bf16=(30, 70)))
    assert missing[0] == "not measured: step time of jaxmp, bf16 / torch.compile AMP, the goal at most 0.93"
    assert sum(line.startswith("not measured") for line in missing) == 9


def test_a_ratio_is_of_the_newest_rounds_that_have_both_rows():
    results = results_of(jaxmp_bf16=(30, 70), compile_bf16=(40, 80))
    results.turns["train"] += [{"jaxmp-bf16": {"milliseconds": [20, 20, 20]}}]
    assert results.figures("train", "jaxmp-bf16")["ms"] == (20, 20, 20)
    assert results.ratio("train", "jaxmp-bf16", "compile-bf16") == (0.75, 0.75, 0.75)
    assert results.ratio("train", "jaxmp-bf16", "hand-bf16") is None
    assert results.utilisation("train", "jaxmp-bf16") == pytest.approx(2e12 / 20e-3 / 400e12)
    assert results.utilisation("train", "compile-bf16") == pytest.approx(2e12 / 40e-3 / 400e12)


def test_a_row_that_failed_says_why_in_the_table_and_counts_nowhere():
    results = results_of(jaxmp_bf16=(30, 70), hand_fp32=(300, 400))
    results.alone["hand-fp32"] = {"train": {"error": "out of memory; the largest batch that fits is 8"}}
    table = report.table(results, "train")
    (row,) = [row for row in table.rows if row[0] == "JAX by hand, fp32"]
    assert row[1] == "out of memory; the largest batch that fits is 8" and set(row[2:]) == {""}
    (own,) = [row for row in table.rows if row[0] == "jaxmp, bf16"]
    assert own[1] == "30" and own[4] == f"{1000 * 1000 / 30:,.0f}" and own[5] == "70.0" and own[8] == "99.5 %"


def test_every_row_of_torch_knows_what_it_needs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert {key for key, row in ROWS.items() if row.missing} == {
        key for key in ROWS if key.startswith(("torch", "compile", "jmp"))
    }
    assert Row("x", "jaxmp", "bf16").missing is None
