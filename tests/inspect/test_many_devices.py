"""Memory, traffic and audits of programs for many GPUs that are not attached."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.jax_utils import replicate
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import sharding
from jaxmp.cli import main
from jaxmp.inspect import audit, memory
from jaxmp.inspect.compiled import targets

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes


MESH = jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
IN, OUT, BATCH = 512, 1024, 4096
PARAMS = 3 * IN * OUT


def placed(spec, *sizes, dtype="float32", mesh=MESH):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))


WEIGHTS = {"up": placed(P("fsdp"), IN, OUT), "down": placed(P("fsdp"), OUT, IN), "head": placed(P("fsdp"), IN, OUT)}
X = placed(P("fsdp"), BATCH, IN, dtype="bfloat16")


def loss(params, batch, gather=sharding.gather):
    weights = gather(params, {name: P("fsdp") for name in params}, "bfloat16")
    x = jnp.tanh(batch @ weights["up"]) @ weights["down"]
    return jnp.mean((x @ weights["head"]).astype("float32") ** 2)


def gathered_wide(params, specs, dtype):
    return {name: jax.sharding.reshard(leaf, P()).astype(dtype) for name, leaf in params.items()}


class TestMemory:
    @pytest.mark.absent_gpu
    def test_it_is_of_each_device_and_says_what_that_sends(self):
        plan = memory(jax.value_and_grad(loss), device="h200", topology="1x1x8")(WEIGHTS, X)
        assert (plan.devices, plan.params, plan.batch) == (8, PARAMS, BATCH)
        assert plan.by_kind["params"] == 4 * PARAMS // 8 and plan.by_kind["batch"] == 2 * BATCH * IN // 8
        totals = plan.collectives.totals
        assert totals["reduce-scatter", "float32", "fsdp"] == 4 * PARAMS * 7 / 8
        assert totals["all-gather", "bfloat16", "fsdp"] == 2 * PARAMS * 7 / 8  # the backward pass reuses them
        assert plan.collectives.wire == sum(totals.values())
        title, *lines = str(plan).splitlines()
        assert title.endswith("MiB at the peak on each of 8 NVIDIA H200 141GB HBM3e, batch of 4096")
        assert lines[2].startswith(
            "sent by each device: 7.88 MiB, 5.25 bytes per param: reduce-scatter float32 fsdp 5.2"
        )
        plain = json.loads(plan.to_json())
        assert plain["devices"] == 8 and {row["axis"] for row in plain["collectives"]["rows"]} == {"fsdp"}

    @pytest.mark.absent_gpu
    def test_two_hosts_are_the_same_program_in_either_spelling(self):
        default_plan, two_host_plan = (
            memory(jax.grad(loss), device="h200", topology=topology)(WEIGHTS, X) for topology in (None, "2 hosts x 4")
        )
        assert default_plan == two_host_plan
        clusters = [targets.target_of("h200").devices(topology) for topology in ("1x2x4", "2 hosts x 4")]
        assert len({str(devices) for devices in clusters}) == 1

    @pytest.mark.once
    def test_the_largest_batch_is_split_over_all_devices(self):
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
        weights = {name: placed(P("fsdp"), *leaf.shape, mesh=mesh) for name, leaf in WEIGHTS.items()}

        def fun(params, batch):
            return loss(params, batch) + 0 * jnp.sum(batch.astype("float32"))

        plan = memory(jax.grad(fun))(weights, placed(P("fsdp"), BATCH, IN, dtype="bfloat16", mesh=mesh))
        largest = plan.largest_batch(2 * plan.peak)
        assert largest > BATCH and largest % 4 == 0

    @pytest.mark.absent_gpu
    def test_a_train_step_is_planned_with_its_state_where_it_stays(self):
        def loss_fn(params, model_state, batch, rng):
            return loss(params, batch), model_state

        tx = jaxmp.loss_scaling(optax.adamw(1e-3), jaxmp.DynamicLossScale())
        zeros = {name: jnp.zeros(leaf.shape) for name, leaf in WEIGHTS.items()}
        state = jax.eval_shape(lambda: jaxmp.TrainState.create(params=zeros, tx=tx, ema=True))
        specs = sharding.fsdp_specs(state, MESH)
        state = jax.tree.map(lambda leaf, spec: placed(spec, *leaf.shape, dtype=leaf.dtype), state, specs)
        plan = memory(jaxmp.make_train_step(loss_fn, ema_decay=0.9), device="h200")(state, X)
        assert plan.params == PARAMS  # the average of the params does not count
        assert plan.by_kind["params"] == 2 * 4 * PARAMS // 8 and plan.by_kind["optimizer"] < 2 * 4 * PARAMS // 8 + 100

    @pytest.mark.absent_gpu
    def test_a_mesh_of_one_device_is_one_device(self):
        mesh = jax.sharding.AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Explicit,))
        weights = {name: placed(P(), *leaf.shape, mesh=mesh) for name, leaf in WEIGHTS.items()}
        plan = memory(jax.grad(loss), device="h200", topology="1x1x1")(
            weights, placed(P("fsdp"), BATCH, IN, dtype="bfloat16", mesh=mesh)
        )
        assert (plan.devices, plan.collectives.rows, plan.params) == (1, (), PARAMS)
        assert "sent by each device" not in str(plan)


def kinds(report):
    return {finding.kind for finding in report.findings} & {
        "float32-gather",
        "activation-gather",
        "gradient-all-reduce",
    }


@pytest.mark.absent_gpu
class TestAudit:
    def test_gathers_in_half_and_sums_that_are_scattered_are_clean(self):
        report = audit(jax.grad(loss), expect="mixed_bfloat16", device="h200", topology="1x1x8")(WEIGHTS, X)
        assert not kinds(report) and report.memory.devices == 8
        assert "sent by each device: 7.88 MiB, 5.25 bytes per param" in str(report)

    def test_a_weight_that_is_cast_after_it_is_gathered(self):
        report = audit(jax.grad(lambda params, batch: loss(params, batch, gathered_wide)), device="h200")(WEIGHTS, X)
        gathers = [finding for finding in report.findings if finding.kind == "float32-gather"]
        assert gathers and "gathered in float32 in a program with half products: " in gathers[0].what
        assert "4 MiB of float32 over fsdp, 1 time a call" in gathers[0].what
        assert gathers[0].remedy.startswith("gather them with jaxmp.sharding.gather")

    def test_it_is_none_in_a_program_of_float32(self):
        def wide(params, batch):
            return loss(params, batch, lambda params, *_: {n: jax.sharding.reshard(w, P()) for n, w in params.items()})

        report = audit(jax.grad(wide), device="h200")(WEIGHTS, placed(P("fsdp"), BATCH, IN))
        assert not kinds(report) & {"float32-gather"}
        assert ("all-gather", "float32", "fsdp") in report.memory.collectives.totals

    def test_activations_gathered_in_place_of_weights_are_a_finding(self):
        def fun(params, batch):
            gathered_batch = jax.sharding.reshard(batch, P())
            return jnp.einsum(
                "bi,io->bo", gathered_batch, params["up"].astype("bfloat16"), out_sharding=P(None, None)
            ).sum()

        weights = {"up": placed(P("fsdp"), IN, OUT)}
        (gather,) = [
            finding for finding in audit(fun, device="h200")(weights, X).findings if finding.kind == "activation-gather"
        ]
        assert "4 MiB of bfloat16 over fsdp, 1 time a call" in gather.what

    def test_a_gradient_summed_whole_on_every_device_is_a_finding(self):
        def gradients(params, batch):
            return jax.tree.map(
                lambda leaf: jax.sharding.reshard(leaf, P()), jax.grad(loss_of_whole_weights)(params, batch)
            )

        def loss_of_whole_weights(params, batch):
            return loss(params, batch, gathered_wide)

        report = audit(jax.jit(gradients), device="h200")(WEIGHTS, X)
        (all_reduce,) = [finding for finding in report.findings if finding.kind == "gradient-all-reduce"]
        assert "are summed whole on every device: 3 MiB of bfloat16 over fsdp" in all_reduce.what
        assert "test_many_devices.py" in all_reduce.source


def test_the_casts_that_a_step_on_a_mesh_adds_are_no_round_trips():
    """The positions are the same for all examples, so their product is one of two weights."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = {name: placed(P("fsdp"), 16, 16, mesh=mesh) for name in ("embedding", "positions", "kernel", "head")}

    def loss_fn(params, batch):
        x = params["embedding"][batch] @ params["kernel"]
        x += params["positions"][jnp.arange(16)] @ params["kernel"]
        return jnp.mean((x @ params["head"]) ** 2)

    options = sharding.Sharding(mesh, {name: P("fsdp") for name in params})
    step = jaxmp.make_train_step(loss_fn, policy="mixed_bfloat16", sharding=options)
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=optax.sgd(0.1)), params)
    report = audit(step, expect="mixed_bfloat16", compile=False)(
        state, placed(P("fsdp"), 8, 16, dtype="int32", mesh=mesh)
    )
    assert report.half_flops == 1 and report.findings == ()


def test_a_cpu_which_sends_half_as_float32_has_no_findings_of_it():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
    weights = {name: placed(P("fsdp"), *leaf.shape, mesh=mesh) for name, leaf in WEIGHTS.items()}
    report = audit(jax.grad(loss))(weights, placed(P("fsdp"), BATCH, IN, dtype="bfloat16", mesh=mesh))
    assert ("all-gather", "float32", "fsdp") in report.memory.collectives.totals and not kinds(report)


def test_arguments_that_contradict_a_topology_are_refused():
    for args, options, message in (
        (
            (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")),
            {"device": "h200", "topology": "1x1x8"},
            "a topology needs arguments on a mesh, got '1x1x8' and no NamedSharding",
        ),
        (
            (WEIGHTS, X),
            {"topology": "1x1x8"},
            r"got '1x1x8' without one; add device='h200', 'a100'.*--device h200",
        ),
        (
            (WEIGHTS, X),
            {"device": "h200", "topology": "8 GPUs"},
            r"slices × hosts × GPUs per host, .* got '8 GPUs'; write '1x1x8' for one host of eight GPUs",
        ),
        (
            (WEIGHTS, X),
            {"device": "h200", "topology": "0x1x8"},
            r"GPUs per host, 1 or more of each .* got '0x1x8'; write '1x1x8' for one host of eight GPUs",
        ),
    ):
        for tool in (memory, audit):
            with pytest.raises(ValueError, match=message):
                tool(loss, **options)(*args)


@pytest.mark.absent_gpu
def test_a_topology_that_does_not_fit_the_mesh_is_refused():
    fits = r"must have as many GPUs as the mesh, got '1x2x2' with 4 and a mesh with 8 \(fsdp=8\); change one of them"
    with pytest.raises(ValueError, match=fits):
        memory(loss, device="h200", topology="1x2x2")(WEIGHTS, X)


MODULE = """
import jax, jax.numpy as jnp
from flax.jax_utils import replicate
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxmp.sharding import gather

MESH = jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))

def step(params, batch):
    def loss(params):
        return ((batch @ gather(params, P("fsdp"), "bfloat16")).astype("float32") ** 2).sum()

    return jax.grad(loss)(params)

def shapes():
    where = NamedSharding(MESH, P("fsdp"))
    return (
        jax.ShapeDtypeStruct((1024, 512), "float32", sharding=where),
        jax.ShapeDtypeStruct((64, 1024), "bfloat16", sharding=where),
    )

def plain():
    return jnp.zeros((1024, 512)), jnp.zeros((64, 1024), "bfloat16")
"""


class TestCommand:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path, monkeypatch):
        (tmp_path / "sharded_program.py").write_text(MODULE)
        monkeypatch.chdir(tmp_path)

    def run(self, command, *flags, args="shapes"):
        return main([command, "sharded_program:step", "--args", f"sharded_program:{args}", *flags])

    @pytest.mark.absent_gpu
    def test_shapes_on_a_mesh_come_from_a_function(self, capsys):
        assert self.run("memory", "--device", "h200", "--topology", "1x1x8", "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["devices"] == 8 and plan["by_kind"]["params"] == 4 * 1024 * 512 // 8
        assert self.run("audit", "--device", "h200", "--topology", "2 hosts x 4") == 0
        assert "bytes per param: reduce-scatter float32 fsdp" in capsys.readouterr().out

    def test_an_error_is_one_line(self, capsys):
        for flags, message in (
            (("--topology", "1x1x8"), "got '1x1x8' without one"),
            (("--device", "h200", "--topology", "many"), "got 'many'"),
        ):
            assert self.run("memory", *flags) == 2
            error = capsys.readouterr().err
            assert error.startswith("jaxmp memory: error: ") and message in error and error.count("\n") == 1


@pytest.mark.once
def test_a_pmapped_step_of_replicated_params_has_reports():
    def step(params, batch):
        grads = jax.grad(lambda params: jnp.mean((batch @ params["w"]) ** 2))(params)
        return jax.tree.map(jnp.subtract, params, jax.lax.pmean(grads, "data"))

    pmapped = jax.pmap(step, axis_name="data")
    args = replicate({"w": jnp.ones((8, 8))}), jnp.ones((4, 2, 8))
    report = audit(pmapped)(*args)
    assert [product.phase for product in report.products] == ["forward", "backward"] and report.findings == ()
    assert report.memory.devices == 4 and report.memory.by_kind["params"] == 8 * 8 * 4
    ((kind, dtype, _),) = memory(pmapped)(*args).collectives.totals
    assert (kind, dtype) == ("all-reduce", "float32")
