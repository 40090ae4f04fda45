"""Where the time of a call goes: planted causes, a trace of a GPU, and repeated calls."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import time
from types import SimpleNamespace

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linen_zoo import numbers

import jaxmp
from jaxmp.inspect import profile
from jaxmp.inspect._profile import kernel_rows, kinds
from jaxmp.inspect._profile.ceilings import Ceilings
from jaxmp.inspect._profile.sentences import Measured, sentences_of
from jaxmp.inspect._profile.trace import Event, events_of
from jaxmp.inspect.compiled import compiling
from jaxmp.inspect.compiled.hlo import HloProgram

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256, name="encoder")(x))
        return nn.Dense(128, name="head")(x)


def _step(policy="mixed_bfloat16", overrides=None):
    model = jaxmp.linen.apply_policy(Net(), policy, overrides)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 256)), jnp.float32)

    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(model.apply({"params": params}, batch) ** 2), model_state

    params = numbers(jax.eval_shape(model.init, jax.random.key(0), x))["params"]
    state = jaxmp.TrainState.create(params=params, tx=optax.adam(1e-3))
    return jaxmp.make_train_step(loss_fn), state, x


def _sentence(measured, start):
    (sentence,) = [sentence for sentence in measured.sentences if start in sentence]
    return sentence


@pytest.fixture(scope="module")
def half_step():
    step, state, x = _step(overrides={"**/head": "float32"})
    return SimpleNamespace(measured=profile(step)(state, x), state=state)


@pytest.mark.once
def test_the_float32_layer_of_a_half_model_is_named(half_step):
    assert _sentence(half_step.measured, "float32 products").endswith("Net/head.")


def test_the_times_by_kind_add_up_to_the_time_of_the_call(half_step):
    measured = half_step.measured
    assert sum(measured.groups.values()) == pytest.approx(measured.milliseconds)
    assert tuple(measured.groups) == kinds.KINDS
    by_kind = sum(row.milliseconds for row in measured.rows if row.kind == kinds.HALF)
    assert measured.groups[kinds.HALF] == pytest.approx(by_kind)
    running = measured.milliseconds - measured.groups[kinds.WAITING]
    assert running > 0 and measured.busy == pytest.approx(running / measured.milliseconds)
    assert measured.tensor_core_time == 0  # a CPU has no tensor cores


def test_each_product_has_its_path_phase_size_and_flops(half_step):
    products = {(row.path, row.phase, row.size): row for row in half_step.measured.rows if row.size}
    sizes = {
        ("Net/encoder", "forward", "128×256×256"): "bfloat16",
        ("Net/head", "forward", "128×256×128"): "float32",
        ("Net/head", "backward", "128×128×256"): "float32",
    }
    for key, dtype in sizes.items():
        row = products[key]
        rows, terms, columns = map(int, row.size.split("×"))
        assert (row.dtype, row.calls, row.flops) == (dtype, 1, 2 * rows * terms * columns)
        assert row.bytes >= 2 * rows * columns and row.ceiling_share > 0
    assert any(row.kind == kinds.UPDATE and row.phase == "update" for row in half_step.measured.rows)


def test_the_state_that_the_step_donates_is_still_there(half_step):
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(half_step.state))
    assert int(half_step.state.step) == 0


def test_a_profile_prints_its_reasons_first_and_is_json_and_a_picture(half_step):
    lines = str(half_step.measured).splitlines()
    assert "ms a call on cpu, busy" in lines[0] and lines[1] == half_step.measured.sentences[0]
    assert any(line.startswith("by kind: half products") for line in lines)
    assert len(json.loads(half_step.measured.to_json())["rows"]) == len(half_step.measured.rows)
    picture = jaxmp.inspect.plots.profile({"float32": half_step.measured, "half": half_step.measured})
    assert picture.get_suptitle().startswith(f"float32: {half_step.measured.headline[:20]}")


@pytest.mark.once
def test_a_model_without_a_policy_is_said_to_run_in_float32():
    step, state, x = _step("float32")
    assert "no policy" in _sentence(profile(step, steps=2)(state, x), "All products run in float32")


@pytest.mark.once
@pytest.mark.parametrize(("with_profiler", "is_slowed"), [(2000.0, False), (4000.0, True)])
def test_a_profiler_that_slows_the_call_is_not_taken_for_a_busy_device(with_profiler, is_slowed, monkeypatch):
    module = importlib.import_module("jaxmp.inspect._profile.profile")
    milliseconds = iter([2000.0, with_profiler])
    row = module._row
    monkeypatch.setattr(module, "_row", lambda call, calls: row(call, calls)._replace(milliseconds=next(milliseconds)))
    measured = profile(jax.jit(jnp.matmul), steps=2)(concrete.ones((8, 8)), concrete.ones((8, 8)))
    assert (measured.milliseconds, measured.milliseconds_without_profiler) == (with_profiler / 2, 1000.0)
    assert measured.not_counted == (("how busy the device is without the profiler",) if is_slowed else ())
    assert ("not counted: how busy" in str(measured)) == is_slowed
    assert any("slows the call down from 1 s to 2 s" in text for text in measured.sentences) == is_slowed


def test_tiny_products_are_named_with_their_size():
    def fun(x, w):
        def body(x, _):
            with jax.named_scope("cell"):
                return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, None, length=50)[0]

    measured = profile(jax.jit(fun), steps=2)(concrete.ones((4, 8)), concrete.ones((8, 8)))
    sentence = _sentence(measured, "too small for this device")
    assert "cell" in sentence and "4×8×8" in sentence
    (product,) = [row for row in measured.rows if row.size == "4×8×8"]
    assert product.calls == 50


def test_a_slow_iterator_of_batches_is_named():
    def batches():
        for _ in itertools.count():
            time.sleep(0.02)
            yield jnp.ones((64, 64))

    measured = profile(jax.jit(lambda w, x: x @ w), steps=2)(concrete.ones((64, 64)), batches())
    assert "the iterator takes" in _sentence(measured, "The device waits")
    assert measured.milliseconds > 20


def test_a_python_function_runs_as_it_is_and_its_programs_are_counted():
    calls = []

    def own_step(w, x):
        calls.append(1)
        grads = jax.jit(jax.grad(lambda w: jnp.mean((x @ w) ** 2)))(w)
        time.sleep(0.005)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)

    measured = profile(own_step, steps=2)(concrete.ones((32, 32)), concrete.ones((32, 32)))
    assert len(calls) == 6  # two to warm up, two without the profiler, two under the profiler
    assert "programs that a call runs, Python computes" in _sentence(measured, "The device waits")
    assert len({row.program for row in measured.rows}) > 1
    # The dtypes of such a function's products are not known on a CPU.
    assert not any("float32" in sentence for sentence in measured.sentences if "products run" in sentence)


def test_a_callback_in_a_jitted_step_is_named():
    def slow(x):
        time.sleep(0.005)
        return x

    @jax.jit
    def step(w, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        with jax.named_scope("log"):
            grads = jax.pure_callback(slow, grads, grads)
        return w - grads

    measured = profile(step, steps=2)(concrete.ones((16, 16)), concrete.ones((16, 16)))
    assert measured.groups[kinds.CALLBACK] > 4
    assert "log/pure_callback" in _sentence(measured, "Python functions that the program calls")


def test_the_step_of_an_nnx_model_is_profiled_and_the_model_stays_the_same():
    model = jaxmp.nnx.apply_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    before = np.asarray(model.kernel[...])
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    measured = profile(step, steps=1)(model, optimizer, concrete.ones((32, 64)))
    assert measured.groups[kinds.HALF] > 0
    np.testing.assert_array_equal(model.kernel[...], before)
    assert int(optimizer.step[...]) == 0


def test_wrong_calls_are_refused():
    donating = jax.jit(lambda params: params["w"] + 1, donate_argnums=0)
    with pytest.raises(ValueError, match="steps"):
        profile(jnp.sum, steps=0)
    with pytest.raises(ValueError, match="iterator that ended"):
        profile(jax.jit(jnp.sum))(iter([concrete.ones(3)]))

    class Loader:
        def __iter__(self):
            return iter([jnp.ones(3)])

    with pytest.raises(TypeError, match=r"argument 0 is a Loader, not a batch; write iter\(...\) around it"):
        profile(jax.jit(jnp.sum))(Loader())
    with pytest.raises(ValueError, match="no kernels"):
        profile(lambda x: 1.0)(2.0)
    with pytest.raises(TypeError, match="argument 0 is donated"):
        profile(donating)({"w": concrete.ones(3)})


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _repeated(w, times, x):
    for _ in range(times):
        w = w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w


def _nnx_call():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return nnx.jit(lambda model, x: model(x)), (model, jnp.ones((32, 64)))


def _nnx_step():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    return step, (model, jaxmp.nnx.Optimizer(model, optax.sgd(0.1)), jnp.ones((32, 64)))


@pytest.fixture
def assumed_gpu(monkeypatch):
    """Take the CPU for a GPU, whose calls are timed for milliseconds instead of a second."""
    monkeypatch.setattr("jaxmp.inspect._profile.profile._SECONDS", 0.0)
    monkeypatch.setattr("jaxmp.inspect._profile.profile._ROUND_MILLISECONDS", 1.0)
    with jaxmp.hardware.assumed("h200"):
        yield


@pytest.mark.parametrize(
    "call",
    [
        lambda: (_repeated, (jnp.ones((64, 64)), 2, jnp.ones((32, 64)))),
        lambda: (_step()[0], _step()[1:]),
        _nnx_call,
        _nnx_step,
    ],
    ids=["jit", "step", "nnx.jit", "nnx step"],
)
def test_for_a_gpu_the_kernels_of_a_second_program_without_cuda_graphs_are_traced(call, assumed_gpu, monkeypatch):
    fun, args = call()
    measured = profile(fun, steps=2)(*args)
    assert measured.groups[kinds.UNKNOWN] == 0 and measured.tensor_core_time > 0
    assert sum(measured.groups.values()) == pytest.approx(measured.milliseconds)
    monkeypatch.setattr("jaxmp.inspect._profile.profile.WITHOUT_CUDA_GRAPHS", {"xla_unknown_option": ""})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_unknown_option"):
        profile(fun, steps=2)(*args)


# What XLA compiles for a GPU: a product of cuBLAS, an attention of cuDNN, casts, a copy, a sum and an update.
GPU_PROGRAM = """HloModule jit_step, is_scheduled=true

%cast (p: f32[512,512]) -> bf16[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  ROOT %convert = bf16[512,512]{1,0} convert(%p), metadata={op_name="jit(step)/jvp(Net)/dense/convert_element_type"}
}

%sum (q: bf16[512,512]) -> f32[512] {
  %q = bf16[512,512]{1,0} parameter(0)
  %wide = f32[512,512]{1,0} convert(%q)
  ROOT %reduce = f32[512]{0} reduce(%wide, %wide), dimensions={0}, to_apply=%add
}

ENTRY %main (w: f32[512,512], x: bf16[512,512], y: bf16[2,64,4,32]) -> f32[] {
  %w = f32[512,512]{1,0} parameter(0)
  %x = bf16[512,512]{1,0} parameter(1)
  %y = bf16[2,64,4,32]{3,2,1,0} parameter(2)
  %convert_fusion = bf16[512,512]{1,0} fusion(%w), kind=kLoop, calls=%cast
  %product.1 = (bf16[512,512]{1,0}, s8[4194304]{0}) custom-call(%x, %convert_fusion), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/jvp(Net)/dense/dot_general"}, backend_config={"lhs_contracting_dimensions":["1"]}
  %attention.2 = (bf16[2,4,64,32]{3,1,2,0}, u8[0]{0}) custom-call(%y, %y, %y), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(step)/transpose(jvp(Net))/attention/dot_product_attention"}
  %copy.3 = bf16[512,512]{1,0} copy(%x)
  %sum_fusion = f32[512]{0} fusion(%x), kind=kInput, calls=%sum, metadata={op_name="jit(step)/transpose(jvp(Net))/dense/reduce_sum"}
  %update.4 = f32[512,512]{1,0} add(%w, %w), metadata={op_name="jit(step)/add"}
  ROOT %end = f32[] constant(0)
}
"""  # noqa: E501


def _gpu_trace():
    """Return a trace of two steps on two GPUs: 4 ms of kernels in each step of the first GPU."""

    def event(name, start, milliseconds, instruction="", **stats):
        stats |= {"hlo_op": instruction, "hlo_module": "jit_step", "program_id": 7} if instruction else {}
        return SimpleNamespace(name=name, start_ns=start * 1e6, duration_ns=milliseconds * 1e6, stats=stats.items())

    kernels, copies = [], []
    for start in (0.0, 10.0):
        kernels += [
            event("loop_convert_fusion", start, 0.25, "convert_fusion"),
            event("nvjet_hsh_256x128", start + 0.25, 1.5, "outer::product.1"),
            event("splitKreduce_kernel", start + 1.75, 0.25, "outer::product.1"),
            event("cudnn_sm90_flash_bprop", start + 2, 1.0, "attention.2"),
            event("input_reduce_fusion", start + 3, 0.5, "sum_fusion"),
            event("loop_add_fusion", start + 3.5, 0.25, "update.4"),
            event("MemcpyH2D", start + 3.75, 0.25),
        ]
        copies += [event("copy_kernel", start + 3, 0.5, "copy.3")]  # beside the sum, so both count half
    streams = [("Stream #13(Compute)", kernels), ("Stream #14(Compute)", copies), ("XLA Ops", [event("dot", 0, 99)])]
    gpu = SimpleNamespace(
        name="/device:GPU:0", lines=[SimpleNamespace(name=name, events=events) for name, events in streams]
    )
    other = SimpleNamespace(name="/device:GPU:1", lines=[SimpleNamespace(name="Stream #1", events=kernels)])
    return SimpleNamespace(planes=[other, gpu, SimpleNamespace(name="/host:CPU", lines=[])])


def test_the_kernels_of_a_gpu_are_joined_to_their_instructions(monkeypatch):
    monkeypatch.setattr(kernel_rows, "live_modules", lambda names: [("jit_step", 7, GPU_PROGRAM)])
    rows = kernel_rows.rows_of(events_of(_gpu_trace()), steps=2)
    shown = {row.instruction: (row.kind, row.path, row.phase, row.calls, row.milliseconds) for row in rows}
    assert shown == {
        "product.1": (kinds.HALF, "Net/dense", "forward", 1, pytest.approx(1.75)),
        "attention.2": (kinds.ATTENTION, "Net/attention", "backward", 1, pytest.approx(1.0)),
        "convert_fusion": (kinds.CAST, "Net/dense", "forward", 1, pytest.approx(0.25)),
        "sum_fusion": (kinds.REDUCTION, "Net/dense", "backward", 1, pytest.approx(0.25)),
        "copy.3": (kinds.MOVE, "", "", 1, pytest.approx(0.25)),  # half of its duration, beside another kernel
        "update.4": (kinds.UPDATE, "", "update", 1, pytest.approx(0.25)),
        "MemcpyH2D": (kinds.MOVE, "", "", 1, pytest.approx(0.25)),
    }
    assert rows == kernel_rows.rows_of(events_of(_gpu_trace()), 2, GPU_PROGRAM)
    assert {row.duration for row in rows if row.instruction in ("copy.3", "sum_fusion")} == {0.5}
    assert rows[0].kernel == "nvjet_hsh_256x128" and rows[0].flops == 2 * 512**3 and rows[0].size == "512×512×512"


def test_kernels_of_a_program_that_is_not_known_for_certain_stay_without_a_path(monkeypatch):
    larger = GPU_PROGRAM.replace("512", "1024")
    monkeypatch.setattr(
        kernel_rows, "live_modules", lambda names: [("jit_step", 1, GPU_PROGRAM), ("jit_step", 2, larger)]
    )
    rows = kernel_rows.rows_of(events_of(_gpu_trace()), steps=2)
    assert {(row.path, row.flops, row.bytes) for row in rows} == {("", 0, None)}
    assert sum(row.milliseconds for row in rows) == pytest.approx(4)


def test_the_kernels_of_a_cuda_graph_are_unknown_and_the_others_are_not():
    names = ["convert_fusion", "command_buffer_12", "command_buffer_12", "sum_fusion"]
    events = [Event(f"kernel_{i}", name, "jit_step", 7, i, i + 1.0) for i, name in enumerate(names)]
    rows = kernel_rows.rows_of(events, 1, GPU_PROGRAM)
    kinds_of = {row.instruction: (row.kind, row.milliseconds) for row in rows}
    assert kinds_of == {
        "convert_fusion": (kinds.CAST, 1.0),
        "command_buffer_12": (kinds.UNKNOWN, 2.0),
        "sum_fusion": (kinds.REDUCTION, 1.0),
    }


def _measured(**changes):
    """Return measurements of a call of 10 ms that has nothing to complain about."""
    row = kernel_rows.ProfileRow(
        kernel="nvjet", kind=kinds.HALF, path="Net/dense", phase="forward", calls=1.0, milliseconds=9.5, duration=9.5,
        dtype="bfloat16", size="8192×8192×8192", flops=2 * 8192**3, bytes=3 * 2 * 8192**2, ceiling_share=1.0,
        program="jit_step", instruction="product", source="",
    )  # fmt: skip
    measured = Measured(
        milliseconds=10.0,
        busy=0.95,
        groups={kinds.HALF: 9.5, kinds.WAITING: 0.5},
        rows=[row],
        ceilings=Ceilings({"bfloat16": 700e12}, 4e12),
    )
    return dataclasses.replace(measured, **changes)


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({}, ["95% of the time is in products, convolutions and attention: half precision makes these faster."]),
        ({"without_profiler": 2.5}, ["The profiler slows the call down from 2.5 ms to 10 ms, so the shares"]),
        ({"is_cpu": True}, ["a CPU computes them more slowly in half precision"]),
        ({"busy": 0.6}, ["The device waits 40% of the time: the host takes longer to start a call"]),
        ({"busy": 0.6, "drawing": 3.0}, ["the iterator takes 3 ms for each batch"]),
        ({"busy": 0.6, "is_python": True}, ["Python computes, reads values (as float(loss) does), waits for data or"]),
        ({"busy": 0.6, "callbacks": ["log/pure_callback"]}, ["the program calls Python in log/pure_callback"]),
        ({"busy": 0.6, "copied": [1]}, ["each call copies the NumPy arrays of argument 1"]),
        ({"groups": {kinds.HALF: 7.0, kinds.CAST: 2.5}}, ["Other kernels: casts 25%.", "Casts: audit shows"]),
        ({"groups": {kinds.HALF: 4.0, kinds.UNKNOWN: 5.0}}, ["50% of the time is in programs that could not be read"]),
        ({"groups": {kinds.HALF: 4.0, kinds.UNKNOWN: 5.0}, "has_graphs": True}, ["50% of the time is in CUDA graphs"]),
        ({"groups": {kinds.HALF: 7.0, kinds.UPDATE: 2.5}}, ["Optimizer and finite check: their time does not depend"]),
    ],
)
def test_sentences_name_what_takes_the_time(changes, phrases):
    sentences = " ".join(sentences_of(_measured(**changes)))
    for phrase in phrases:
        assert phrase in sentences
    if not changes:
        assert len(sentences_of(_measured())) == 1


@pytest.mark.parametrize(
    ("share", "phrase"),
    [(0.9, ", which the bytes that they move limit: casts 30%."), (0.1, ", many of them too short")],
)
def test_other_kernels_are_limited_by_bytes_only_if_they_are_fast(share, phrase):
    product = _measured().rows[0]
    cast = dataclasses.replace(product, kind=kinds.CAST, dtype="", size="", milliseconds=3.0, ceiling_share=share)
    measured = _measured(rows=[product, cast], groups={kinds.HALF: 6.5, kinds.CAST: 3.0, kinds.WAITING: 0.5})
    assert any(f"Other kernels{phrase}" in sentence for sentence in sentences_of(measured))


def test_the_command_prints_the_profile(tmp_path, monkeypatch, capsys):
    from jaxmp.cli import main

    (tmp_path / "planted_profile.py").write_text(
        "import jax\nimport jax.numpy as jnp\n"
        "@jax.jit\ndef fun(w, x):\n    return x @ w\n"
        "def args():\n    return jnp.ones((512, 512)), jnp.ones((512, 512))\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["profile", "planted_profile:fun", "--args", "planted_profile:args", "--steps", "1"]
    # The profiler may slow down so short a call, and then the code is 1.
    code = main([*command, "--policy", "mixed_bfloat16", "--plot", "p.png"])
    text = capsys.readouterr().out
    assert "half products" in text and (tmp_path / "p.png").stat().st_size > 1000
    assert code == ("not counted: " in text)
    code = main([*command, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["groups"]["float32 products"] > 0 and code == bool(report["not_counted"])


@pytest.mark.absent_gpu
def test_every_kernel_that_xla_compiles_for_a_gpu_has_a_kind_and_every_product_a_path():
    step, state, _ = _step()
    shapes = jax.eval_shape(lambda: state), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    text = str(compiling.compiled(step, shapes, "h200").as_text())
    program = HloProgram(text)
    events = []
    for _, instruction, _ in program.instructions_by_run(into_fusions=False):
        if instruction.is_kernel:
            start = float(len(events))
            events.append(Event(instruction.name, instruction.name, program.name, 1, start, start + 1))
    rows = kernel_rows.rows_of(events, 1, text)
    assert len(rows) == len(events) > 10
    assert kinds.OTHER not in {row.kind for row in rows}
    products = [row for row in rows if row.kind == kinds.HALF]
    assert len(products) == 5 and all(row.flops and row.size for row in products)
    assert {(row.path, row.phase) for row in products} == {
        ("Net/encoder", "forward"), ("Net/head", "forward"), ("Net/encoder", "backward"), ("Net/head", "backward")
    }  # fmt: skip
