"""Train steps on a mesh: weights gathered where they are used, gradients reduced once, numbers of one device."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from experiments.models import nnx as nnx_models
from experiments.models.gpt2 import GPT2
from jaxmp import sharding
from jaxmp._jaxpr.walk import equations
from jaxmp.inspect import targets

pytestmark = pytest.mark.usefixtures("standard_promotion")

once = pytest.mark.once
VOCABULARY, SEQUENCE, WIDTH, LAYERS, BATCH = 64, 8, 32, 3, 8
MODEL = GPT2(vocabulary=VOCABULARY, sequence=SEQUENCE, layers=1, heads=2, width=WIDTH)


def mesh_of(kind=AxisType.Auto, **sizes):
    sizes = sizes or {"fsdp": 4}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def tokens(n=BATCH):
    return np.random.default_rng(0).integers(0, VOCABULARY, (n, SEQUENCE + 1)).astype(np.int32)


def linen_params(model=MODEL):
    return model.init(jax.random.key(0), jnp.zeros((1, SEQUENCE), jnp.int32))["params"]


def linen_loss(model=MODEL):
    def loss_fn(params, model_state, batch, rng):
        return model.apply({"params": params}, batch[:, :-1], batch[:, 1:], method="loss"), model_state

    return loss_fn


def stacked_params():
    rng = np.random.default_rng(0)

    def normal(*sizes):
        return jnp.asarray(rng.normal(size=sizes) / WIDTH**0.5, jnp.float32)

    return {
        "table": normal(VOCABULARY, WIDTH),
        "layers": {"up": normal(LAYERS, WIDTH, 2 * WIDTH), "down": normal(LAYERS, WIDTH, 2 * WIDTH)},
        "bias": normal(LAYERS, 2 * WIDTH),
    }


def stacked_loss(params, model_state, batch, rng):
    """Layers in a scan, one weight transposed, the table looked up and used as a product."""

    def layer(x, params):
        weights, bias = params
        h = jnp.tanh(x @ weights["up"] + bias)
        return x + h @ weights["down"].T, None

    x = jnp.einsum("bv,vd->bd", jax.nn.one_hot(batch[:, 0], VOCABULARY), params["table"])
    x, _ = jax.lax.scan(layer, x, (params["layers"], params["bias"]))
    logits = x @ params["table"].T
    return jnp.mean(jaxmp.losses.cross_entropy(logits, batch[:, 1])), model_state


def tx_of(scale=None):
    return jaxmp.loss_scaling(optax.sgd(0.05, momentum=0.9), scale or jaxmp.DynamicLossScale())


def specs_of(make_params, mesh, **options):
    return sharding.fsdp_specs(jax.eval_shape(make_params), mesh, min_size=512, **options)


def pair(make_params, loss_fn, mesh, specs, step_options=(), **options):
    """The steps and states of one device, and of the mesh."""
    common = {"donate": False, **dict(step_options)}
    one = jaxmp.TrainState.create(params=make_params(), tx=tx_of())
    many = sharding.init_state(make_params, tx_of(), mesh, specs)
    steps = (
        jaxmp.make_train_step(loss_fn, **common),
        jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs, **options, **common),
    )
    return steps, (one, many)


def differences(one, many):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    return max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)


def after_five(steps, states, batch):
    states = list(states)
    for _ in range(5):
        for n, step in enumerate(steps):
            states[n], metrics = step(states[n], batch)
            assert not metrics["skipped"]
    assert steps[1].jitted._cache_size() == 1
    return states


class TestNumbers:
    """In float32 those of one device."""

    def require_one_devices(self, mesh, specs, more, options):
        """Of a small GPT-2, and each param lies where its spec says."""
        steps, states = pair(linen_params, linen_loss(), mesh, specs, more, **options)
        one, many = after_five(steps, states, tokens())
        assert differences(one.params, many.params) <= 2e-6
        for leaf, spec in zip(jax.tree.leaves(many.params), sharding.specs_in(specs), strict=True):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)

    @pytest.mark.parametrize(
        ("kind", "sizes", "options", "more"),
        [
            (AxisType.Explicit, {"fsdp": 4}, {}, {}),  # by Auto: JAX has no types for Flax's embeddings
            pytest.param(AxisType.Auto, {"data": 2, "fsdp": 2}, {}, {"remat": "full"}, marks=once),
            pytest.param(AxisType.Auto, {"fsdp": 4}, {"reduce": "once"}, {"accumulate_steps": 2}, marks=once),
            pytest.param(AxisType.Auto, {"fsdp": 4}, {}, {"accumulate_steps": 2, "remat": "dots"}, marks=once),
        ],
    )
    def test_linen(self, kind, sizes, options, more):
        mesh = mesh_of(kind, **sizes)
        self.require_one_devices(mesh, specs_of(linen_params, mesh), more, options)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("options", [{}, {"reduce": "once"}], ids=["each", "once"])
    def test_layers_in_a_scan(self, kind, options):
        mesh = mesh_of(kind)
        specs = specs_of(stacked_params, mesh, stacked=["layers", "bias"])
        assert specs["layers"]["up"] == P(None, None, "fsdp") and specs["bias"] == P()
        more = {"accumulate_steps": 2} if options else {}
        steps, states = pair(stacked_params, stacked_loss, mesh, specs, more, **options)
        one, many = after_five(steps, states, tokens())
        assert differences(one.params, many.params) <= 2e-6

    @pytest.mark.parametrize(
        ("kind", "sizes", "options", "more"),
        [
            pytest.param(AxisType.Auto, {"data": 1, "fsdp": 2, "tensor": 2}, {}, {}, marks=once),
            (AxisType.Explicit, {"data": 2, "fsdp": 1, "tensor": 2}, {}, {"accumulate_steps": 2}),
            pytest.param(
                AxisType.Auto, {"fsdp": 2, "tensor": 2}, {"reduce": "once"}, {"accumulate_steps": 2}, marks=once
            ),
        ],
    )
    def test_products_split_over_an_axis_with_which_no_batch_is(self, kind, sizes, options, more):
        mesh = mesh_of(kind, **sizes)
        rules = {
            "**/c_attn/kernel": P("fsdp", "tensor"),
            "**/c_attn/bias": P("tensor"),
            "**/c_fc/kernel": P("fsdp", "tensor"),
            "**/c_proj/kernel": P("tensor", "fsdp"),
            "wte": P("tensor", "fsdp"),
        }
        self.require_one_devices(mesh, specs_of(linen_params, mesh, rules=rules), more, options)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("up", [P("fsdp", "tensor"), P(("fsdp", "tensor")), P(None, "tensor")])
    def test_a_dense_layer_split_over_a_third_axis(self, kind, up):
        def make_params():
            rng = np.random.default_rng(0)
            shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
            return {name: jnp.asarray(rng.normal(size=size) / 6, jnp.float32) for name, size in shapes.items()}

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2), model_state

        mesh = mesh_of(kind, data=1, fsdp=2, tensor=2)
        steps, states = pair(make_params, loss_fn, mesh, {"up": up, "down": P("tensor", "fsdp")})
        one, many = after_five(steps, states, np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32))
        assert differences(one.params, many.params) <= 2e-6

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_calls_and_remat_whose_weights_were_gathered_before_them(self, kind):
        first, second = jax.jit(lambda x, w: jnp.tanh(x @ w)), jax.checkpoint(lambda x, w: jnp.sin(x @ w))

        def loss_fn(params, model_state, x, rng):
            x = second(first(x, params["a"]), params["b"])
            x = jax.jit(lambda x, w: first(x, w) + second(x, w))(x, params["c"])
            return jnp.mean(x**2), model_state

        mesh, names = mesh_of(kind), "abc"
        batch = np.random.default_rng(1).normal(size=(BATCH, 16)).astype(np.float32)
        specs, more = dict.fromkeys(names, P("fsdp")), {"accumulate_steps": 2}
        make_params = functools.partial(dict.fromkeys, names, jnp.eye(16))
        steps, states = pair(make_params, loss_fn, mesh, specs, more, reduce="once")
        one, many = after_five(steps, states, batch)
        assert differences(one.params, many.params) <= 2e-6

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("options", [{}, {"reduce": "once"}], ids=["each", "once"])
    def test_a_weight_of_many_uses(self, kind, options):
        """Side by side, in calls of calls, in loops, computed again, for each example, in a branch."""
        jitted, again = jax.jit(lambda x, w: jnp.tanh(x @ w)), jax.checkpoint(lambda x, w: jnp.sin(x @ w))

        def loss_fn(params, model_state, x, rng):
            w = params["w"]
            x = jitted(jax.jit(lambda x, w: again(jitted(x, w), w))(x, w), w.T)
            x, _ = jax.lax.scan(lambda x, _: (jitted(again(x, w), w), None), x, None, length=2)
            x, _ = jax.lax.scan(lambda x, w: (jitted(jitted(x, w), w), None), x, jnp.stack([w, w]))
            x = jax.vmap(lambda x: jitted(again(x, w), w))(x)
            x = jax.lax.cond(jnp.mean(x) > 0, lambda x, w: again(jitted(x, w), w), lambda x, w: jitted(x, w), x, w)
            return jnp.mean((x @ w) ** 2), model_state

        def make_params():
            return {"w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)) / 4, jnp.float32)}

        batch = np.random.default_rng(1).normal(size=(BATCH, 16)).astype(np.float32)
        steps, states = pair(make_params, loss_fn, mesh_of(kind), {"w": P("fsdp")}, {"accumulate_steps": 2}, **options)
        one, many = after_five(steps, states, batch)
        assert differences(one.params, many.params) <= 2e-6

    def test_looped_blocks(self):
        model = MODEL.clone(layers=2, loop=True, remat="full")
        mesh = mesh_of()
        specs = specs_of(lambda: linen_params(model), mesh, stacked=["h_0"])
        assert not any(any(spec[:1]) for spec in sharding.specs_in(specs["h_0"]))
        steps, states = pair(lambda: linen_params(model), linen_loss(model), mesh, specs)
        one, many = after_five(steps, states, tokens())
        assert differences(one.params, many.params) <= 2e-6

    @pytest.mark.once
    @pytest.mark.parametrize("exact", [False, True])
    def test_adam_differs_in_the_keys_bias_alone_whose_gradient_is_0_but_for_rounding(self, exact):
        """It adds the same to all scores of a query. Adam divides what is left by its own size."""

        def of_keys(tree):
            return tree["h_0"]["attn"]["c_attn"]["bias"][WIDTH : 2 * WIDTH]

        def without_keys(tree, fill):
            layer = tree["h_0"]["attn"]["c_attn"]
            bias = jnp.concatenate([layer["bias"][:WIDTH], jnp.full(WIDTH, fill), layer["bias"][2 * WIDTH :]])
            own = {**tree["h_0"]["attn"], "c_attn": {**layer, "bias": bias}}
            return {**tree, "h_0": {**tree["h_0"], "attn": own}}

        zeroed = optax.stateless(lambda updates, _: without_keys(updates, 0.0)) if exact else optax.identity()
        tx = jaxmp.loss_scaling(optax.chain(zeroed, optax.adamw(1e-3)), jaxmp.NoOpLossScale())
        mesh = mesh_of()
        specs = specs_of(linen_params, mesh)
        steps = [jaxmp.make_train_step(linen_loss(), donate=False, **on) for on in ({}, {"mesh": mesh, "specs": specs})]
        made = jaxmp.TrainState.create(params=linen_params(), tx=tx)
        states = [made, sharding.init_state(linen_params, tx, mesh, specs)]
        gradients = jax.grad(lambda params: linen_loss()(params, None, tokens(), None)[0])(linen_params())
        bias = gradients["h_0"]["attn"]["c_attn"]["bias"]
        assert np.abs(of_keys(gradients)).max() <= 1e-6 * np.abs(bias).max()
        one, many = (state.params for state in after_five(steps, states, tokens()))
        assert differences(without_keys(one, 1.0), without_keys(many, 1.0)) <= (2e-6 if exact else 1e-5)
        if exact:
            assert not np.any(of_keys(one)) and not np.any(of_keys(many))
        else:
            assert differences(of_keys(one), of_keys(many)) > 1e-3

    def test_convolutions_and_statistics_of_the_whole_batch(self):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Conv(32, (3, 3), use_bias=False)(x)
                x = nn.BatchNorm(use_running_average=False)(x)
                return nn.Dense(8)(nn.relu(x).reshape(len(x), -1))

        def loss_fn(params, model_state, batch, rng):
            logits, new = Net().apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
            return jnp.mean(logits**2), new

        images = np.random.default_rng(0).normal(size=(BATCH, 4, 4, 3)).astype(np.float32)
        variables = Net().init(jax.random.key(0), images)
        params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}
        mesh = mesh_of()
        specs = specs_of(lambda: params, mesh)
        states = [jaxmp.TrainState.create(params=params, tx=tx_of(), model_state=rest) for _ in range(2)]
        steps = [jaxmp.make_train_step(loss_fn, donate=False, **more) for more in ({}, {"mesh": mesh, "specs": specs})]
        one, many = after_five(steps, states, images)
        assert differences((one.params, one.model_state), (many.params, many.model_state)) <= 2e-6

    def test_nnx(self):
        mesh = mesh_of()

        def made():
            model = nnx_models.GPT2(VOCABULARY, SEQUENCE, 1, WIDTH, rngs=nnx.Rngs(0))
            return model, jaxmp.nnx.Optimizer(model, optax.sgd(0.5), loss_scale=jaxmp.DynamicLossScale())

        def loss_fn(model, batch):
            return jnp.mean(jaxmp.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:]))

        specs = sharding.fsdp_specs(nnx.state(made()[0], nnx.Param), mesh, min_size=512)
        found = []
        for options in ({}, {"mesh": mesh, "specs": specs}):
            (model, optimizer), step = made(), jaxmp.nnx.make_train_step(loss_fn, **options)
            for _ in range(5):
                step(model, optimizer, tokens())
            found.append(nnx.as_pure(nnx.state(model, nnx.Param)))
        assert differences(*found) <= 2e-6
        split = [leaf for leaf in jax.tree.leaves(found[1]) if not leaf.sharding.is_fully_replicated]
        assert len(split) == 5

    @pytest.mark.once
    def test_what_is_made_of_weights_is_a_weight(self):
        """A low-rank update: the gradient of its product is that of a weight, summed over all rows first."""

        def make_params():
            rng = np.random.default_rng(0)
            shapes = {"w": (WIDTH, WIDTH), "a": (WIDTH, 32), "b": (32, WIDTH)}
            return {name: jnp.asarray(rng.normal(size=size) / 6, jnp.float32) for name, size in shapes.items()}

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((batch @ (params["w"] + 0.5 * (params["a"] @ params["b"]))) ** 2), model_state

        mesh = mesh_of()
        steps, states = pair(make_params, loss_fn, mesh, specs_of(make_params, mesh))
        batch = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
        one, many = after_five(steps, states, batch)
        assert differences(one.params, many.params) <= 2e-6

    @pytest.mark.parametrize("how", ["float64", "a derivative", "an axis of tensors", "an optimizer"])
    def test_explicit_axes(self, how):
        """What JAX cannot type, be it of the derivative or of the optimizer alone, runs on axes of type Auto."""

        @jax.custom_vjp
        def product(x, w):
            return x @ w

        product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))

        def loss_fn(params, model_state, batch, rng):
            x = product(batch, params["up"]) if how == "a derivative" else batch @ params["up"]
            return jnp.mean((jnp.tanh(x) @ params["down"]) ** 2).astype("float32"), model_state

        sizes, specs = {"fsdp": 4}, {"up": P("fsdp"), "down": P("fsdp")}
        if how == "an axis of tensors":
            sizes, specs = {"fsdp": 2, "tensor": 2}, {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
        tx = optax.contrib.muon(0.1) if how == "an optimizer" else optax.sgd(0.1)
        mesh = mesh_of(AxisType.Explicit, **sizes)
        with jax.enable_x64(how == "float64"):
            rng = np.random.default_rng(0)
            dtype = how if how == "float64" else "float32"
            shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
            params = {name: rng.normal(size=size).astype(dtype) / 6 for name, size in shapes.items()}
            batch = rng.normal(size=(BATCH, WIDTH)).astype(dtype)
            one = jaxmp.TrainState.create(params=jax.tree.map(jnp.array, params), tx=tx)
            many = sharding.init_state(lambda: params, tx, mesh, specs)
            one, _ = jaxmp.make_train_step(loss_fn)(one, batch)
            many, _ = jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs)(many, batch)
        assert differences(one.params, many.params) <= (1e-14 if how == "float64" else 2e-6)
        assert all(many.params[name].sharding == NamedSharding(mesh, spec) for name, spec in specs.items())

    def test_evaluation_on_explicit_axes(self):
        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((batch @ params["w"]) ** 2), model_state, {"largest": jnp.max(params["w"])}

        params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), jnp.float32)}
        batch = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
        state = sharding.init_state(lambda: params, tx_of(), mesh_of(AxisType.Explicit), {"w": P("fsdp")})
        found = jaxmp.make_eval_step(loss_fn)(state, batch)
        np.testing.assert_allclose(found["loss"], loss_fn(params, None, batch, None)[0], rtol=1e-6)
        assert found["largest"] == jnp.max(params["w"])

    @pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.once), AxisType.Explicit])
    def test_a_run_that_diverges_says_so(self, kind):
        """The error, the search for its first operation, and the program of a step need no mesh to be set."""

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean(jnp.log(batch @ params["w"])), model_state

        mesh, specs = mesh_of(kind), {"w": P("fsdp")}
        state = sharding.init_state(lambda: {"w": jnp.ones((WIDTH, WIDTH))}, optax.sgd(1.0), mesh, specs)
        step = jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs, max_consecutive_skips=1)
        batch = np.zeros((BATCH, WIDTH), np.float32)
        moved = sharding.collectives(step.jitted.lower(state, batch).compile())
        assert "reduce-scatter" in {row.kind for row in moved.rows}
        message = r"not finite now: the loss \(-inf\); gradients of 'w'\. .*First: forward division by zero in log"
        with pytest.raises(jaxmp.NonFiniteTrainingError, match=message) as caught:
            for _ in range(9):
                state, _ = jax.block_until_ready(step(state, batch))
        assert caught.value.blame.primitive == "log"

    @pytest.mark.once
    def test_half_policies_stay_near_one_device(self):
        mesh = mesh_of()
        model = jaxmp.linen.apply_policy(MODEL, "mixed_bfloat16")
        steps, states = pair(linen_params, linen_loss(model), mesh, specs_of(linen_params, mesh))
        states = [step(state, tokens())[0] for step, state in zip(steps, states, strict=True)]
        start = linen_params()
        for key in ("wte", "h_0"):
            moved = [
                jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), s.params[key], start[key]) for s in states
            ]
            for a, b in zip(*map(jax.tree.leaves, moved), strict=True):
                assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a) + 1e-6

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_activations_as_large_as_a_weight_are_none(self, kind):
        """A param for each example, and a norm whose scale is a slice of a larger one."""

        def loss_fn(params, model_state, batch, rng):
            h = batch @ params["w"][0]
            h = h * (jax.lax.rsqrt(h.var(0) + 1) * params["w"][1, 0]) + params["each"]
            return jnp.mean(jnp.tanh(h) ** 2), model_state

        rng = np.random.default_rng(0)
        params = {"w": rng.normal(size=(2, WIDTH, WIDTH)), "each": rng.normal(size=(BATCH, WIDTH))}
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        mesh, specs = mesh_of(kind), {"w": P(None, None, "fsdp"), "each": P()}
        steps, states = pair(lambda: params, loss_fn, mesh, specs)
        one, many = after_five(steps, states, rng.normal(size=(BATCH, WIDTH)).astype(np.float32))
        assert differences(one.params, many.params) <= 2e-6

    def test_an_infinity_in_one_shard_skips_the_step_on_all(self):
        mesh = mesh_of()

        def loss_fn(params, model_state, batch, rng):
            return jnp.mean((batch @ params["w"]) ** 2), model_state

        params = {"w": jnp.ones((WIDTH, WIDTH))}
        step = jaxmp.make_train_step(loss_fn, mesh=mesh, specs={"w": P("fsdp")}, donate=False)
        state = jaxmp.TrainState.create(params=params, tx=tx_of())
        batch = np.ones((BATCH, WIDTH), np.float32)
        batch[-1, 0] = np.inf
        state, metrics = step(state, batch)
        assert metrics["skipped"] and float(jaxmp.optimizer.get_loss_scale(state.opt_state).loss_scale) == 2**14
        np.testing.assert_array_equal(np.asarray(state.params["w"]), 1)


def wire(step, state, batch, mesh):
    """The dtypes in which weights are gathered, by shape, and those in which gradients are reduced."""
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(step._step)(state, batch)
    gathers, reductions = {}, set()
    for eqn in equations(program):
        if eqn.primitive.name in ("sharding_constraint", "reshard"):
            aval = eqn.outvars[0].aval
            gathers.setdefault(aval.shape, set()).add(aval.dtype.name)
        if eqn.primitive.name in ("reduce_scatter", "psum", "psum_invariant"):
            reductions |= {var.aval.dtype.name for var in eqn.invars}
    return gathers, reductions


def where(eqn):
    """The spec of what an equation lays out."""
    return next(eqn.params[name] for name in ("sharding", "dst_sharding") if name in eqn.params).spec


class TestDtypes:
    """In the program: a CPU widens half collectives."""

    @pytest.mark.parametrize("how", ["linen", "autocast"])
    @pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
    def test_weights_are_gathered_in_half_and_gradients_reduced_as_asked(self, how, reduce_dtype):
        mesh, specs = mesh_of(), specs_of(linen_params, mesh_of())
        options = {"mesh": mesh, "specs": specs, "reduce_dtype": reduce_dtype}
        if how == "linen":
            step = jaxmp.make_train_step(linen_loss(jaxmp.linen.apply_policy(MODEL, "mixed_bfloat16")), **options)
        else:
            step = jaxmp.make_train_step(linen_loss(), policy="mixed_bfloat16", **options)
        state = sharding.init_state(linen_params, tx_of(), mesh, specs)
        gathers, reductions = wire(step, state, tokens(), mesh)
        shapes = {
            leaf.shape
            for leaf, spec in zip(jax.tree.leaves(state.params), sharding.specs_in(specs), strict=True)
            if spec
        }
        split = {(VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)}
        assert shapes == split
        for size in split:
            assert gathers[size] == {"bfloat16"}, size
        assert reductions == {reduce_dtype}

    def test_an_override_to_float32_is_gathered_in_float32(self):
        mesh, specs = mesh_of(), specs_of(linen_params, mesh_of())
        model = jaxmp.linen.apply_policy(MODEL, "mixed_bfloat16", {"h_0/mlp/c_fc": "float32"})
        step = jaxmp.make_train_step(linen_loss(model), mesh=mesh, specs=specs)
        state = sharding.init_state(linen_params, tx_of(), mesh, specs)
        gathers, _ = wire(step, state, tokens(), mesh)
        assert gathers[WIDTH, 4 * WIDTH] == {"float32"} and gathers[4 * WIDTH, WIDTH] == {"bfloat16"}

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_slices_of_a_scan_are_gathered_in_its_body(self, kind):
        mesh = mesh_of(kind)
        specs = specs_of(stacked_params, mesh, stacked=["layers", "bias"])
        step = jaxmp.make_train_step(stacked_loss, mesh=mesh, specs=specs, policy="mixed_bfloat16")
        state = sharding.init_state(stacked_params, tx_of(), mesh, specs)
        batch = jax.device_put(tokens(), NamedSharding(mesh, P("fsdp")))
        gathers, reductions = wire(step, state, batch, mesh)
        assert gathers[WIDTH, 2 * WIDTH] == gathers[VOCABULARY, WIDTH] == {"bfloat16"}
        assert (LAYERS, WIDTH, 2 * WIDTH) not in gathers and reductions == {"float32"}

    @pytest.mark.parametrize(
        "how",
        [
            "a jitted cast",
            "slices of what was reshaped",
            "a scan that casts",
            "an index",
            "a factor of the batch",
            "a loop",
        ],
    )
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_weight_that_passes_through_other_code_is_one_still(self, how, kind):
        """Each device sums its rows of the gradient in float32, not in the dtype of the product."""

        def loss_fn(params, model_state, batch, rng):
            w, x = params["w"], batch.astype("bfloat16")
            if how == "an index":
                x = jax.lax.fori_loop(0, 4, lambda n, x: jnp.tanh(x @ w[n].astype("bfloat16")), x)
            elif how == "loop":
                first = jax.lax.fori_loop(0, 2, lambda _, w: 0.9 * w, w[0]).astype("bfloat16")
                x = jnp.tanh((x * w[1, 0].astype("bfloat16")) @ first @ w[2].astype("bfloat16"))
            elif how == "a factor of the batch":
                x = jnp.tanh(x @ (w[0] * (1 + jnp.mean(batch))).astype("bfloat16") @ w[1].astype("bfloat16"))
            else:
                if how == "slices of what was reshaped":
                    stack = w.reshape(2, 2, WIDTH, WIDTH).astype("bfloat16")
                elif how == "a jitted cast":
                    stack = jax.jit(lambda w: w.reshape(2, 2, WIDTH, WIDTH).astype("bfloat16"))(w)
                else:
                    stack = jax.lax.map(lambda w: w.astype("bfloat16"), w).reshape(2, 2, WIDTH, WIDTH)
                x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x, stack)
            return jnp.mean(x.astype("float32") ** 2), model_state

        mesh, specs = mesh_of(kind), {"w": P(None, "fsdp")}
        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.normal(size=(4, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)}
        batch = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        steps, states = pair(lambda: params, loss_fn, mesh, specs)
        with jax.set_mesh(mesh):
            program = jax.make_jaxpr(steps[1]._step)(states[1], batch)
        products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        of_weights = [eqn.outvars[0].aval for eqn in products if set(eqn.outvars[0].aval.shape) == {WIDTH}]
        assert {aval.dtype.name for aval in of_weights} == {"float32"}
        (one, seen), (many, _) = (step(state, batch) for step, state in zip(steps, states, strict=True))
        assert differences(one.params, many.params) <= 1e-3 and not seen["skipped"]

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize(
        ("how", "count"),
        [
            ("side by side", 2),
            ("einsum", 2),
            ("calls of calls", 2),
            ("calls and computed again", 2),
            ("computed again", 1),  # it has the weight at hand
            ("turns of a loop", 1),
            ("a loop over layers", 2),
            ("each example", 2),
            ("around code of its own", 2),
            ("tied", 1),  # rows are looked up without the table's gradient
            ("autocast", 2),
            ("linen", 2),
            ("nnx", 2),
        ],
    )
    def test_weights_of_several_uses_are_gathered_once_in_a_pass(self, how, count, kind):
        """Once for all passes if the gradients of microbatches are reduced once."""

        def layer(x, w):
            return jnp.sin(jnp.tanh(x @ w))

        @jax.custom_vjp
        def own(x):
            return 2 * x

        own.defvjp(lambda x: (own(x), None), lambda _, cotangent: (2 * cotangent,))
        jitted, again, shape = jax.jit(layer), jax.checkpoint(layer), (WIDTH, WIDTH)
        twice = jax.jit(lambda x, w: jitted(jitted(x, w), w))
        model = jaxmp.linen.apply_policy(nn.Dense(WIDTH, use_bias=False), "mixed_bfloat16")
        linear = nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
        graphdef, _ = nnx.split(jaxmp.nnx.apply_policy(linear, "mixed_bfloat16"))
        apply = {
            "linen": lambda x, w: jnp.sin(model.apply({"params": {"kernel": w}}, x)),
            "nnx": lambda x, w: jnp.sin(nnx.merge(graphdef, {"kernel": w})(x)),
            "einsum": lambda x, w: jnp.sin(jnp.einsum("bi,ij->bj", x, w)),
            "each example": jax.vmap(jitted, (0, None)),
            "around code of its own": lambda x, w: own(jitted(own(x), w)),
            "computed again": again,
        }.get(how, layer)

        def loss_fn(params, model_state, x, rng):
            w = params["w"] if how in ("autocast", "linen", "nnx") else params["w"].astype("bfloat16")
            x = x if how in ("autocast", "linen", "nnx") else x.astype("bfloat16")
            if how == "tied":
                x = jnp.sin(w[jnp.arange(len(x))]) @ w.T
            elif how == "calls of calls":
                x = twice(twice(x, w), w)
            elif how == "calls and computed again":
                x = twice(jax.jit(lambda x, w: again(jitted(x, w), w))(x, w), w)
            elif how == "turns of a loop":
                x, _ = jax.lax.scan(lambda x, _: (again(jitted(x, w), w), None), x, None, length=2)
            elif how == "a loop over layers":
                x, _ = jax.lax.scan(lambda x, w: (twice(x, w), None), x, params["w"].astype("bfloat16"))
            else:
                x = apply(apply(x, w), w)
            return jnp.mean(x.astype("float32") ** 2), model_state

        mesh, specs, more = mesh_of(kind), {"w": P("fsdp")}, {}
        if how == "a loop over layers":
            shape, specs = (LAYERS, *shape), {"w": P(None, "fsdp")}
        if how == "autocast":
            more = {"policy": "mixed_bfloat16"}
        state = sharding.init_state(lambda: {"w": jnp.ones(shape)}, tx_of(), mesh, specs)
        batch = jax.device_put(np.ones((2 * BATCH, WIDTH), np.float32), NamedSharding(mesh, P("fsdp")))
        for own_options, expected in (
            ({}, count),
            ({"accumulate_steps": 2}, count),
            ({"accumulate_steps": 2, "reduce": "once"}, 1),
        ):
            step = jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs, **own_options, **more)
            with jax.set_mesh(mesh):
                program = jax.make_jaxpr(step._step)(state, batch)
            last = shape if "reduce" in own_options else shape[-2:]
            moved = [eqn for eqn in equations(program) if eqn.primitive.name in ("sharding_constraint", "reshard")]
            moved = [eqn for eqn in moved if eqn.outvars[0].aval.shape == last and not any(where(eqn))]
            assert [eqn.outvars[0].aval.dtype.name for eqn in moved] == expected * ["bfloat16"], own_options

    @pytest.mark.parametrize(
        "how",
        [
            "a convolution of one example",
            "a convolution of groups of examples",
            "carried",
            "carried in half",
            "changed by what is carried",
            "changed by the batch",
            "from zeros",
            "in a loop in a loop",
            "times a constant",
            "one of two",
            "used in a branch",
        ],
    )
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_sums_of_gradients_are_those_of_float32(self, how, kind):
        """Of integers, which bfloat16 does not hold from 257 on: what each device adds it does."""

        def loss_of(half):
            def looped(turn, x, weight):
                """The sum of the products with what is carried."""

                def added(carry, _):
                    total, weight = carry
                    return (total + (x @ weight.astype(half)).astype("float32"), turn(weight)), None

                start = jnp.zeros_like(x, "float32"), weight
                return jax.lax.scan(added, start, None, length=1 if how == "carried in half" else 2)[0][0]

            def loss_fn(params, model_state, batch, rng):
                w, x, zeros = params["w"], batch.astype(half), jnp.zeros((4, 4))
                if how.startswith("a convolution"):
                    groups = 4 if how.endswith("examples") else 1
                    x = x.reshape((-1, 2, 2, 1) if groups > 1 else (1, -1, 4, 1))
                    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "batch_group_count": groups}
                    weight = w.reshape(2, 2, 1, 4).astype(half)
                    y = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", **numbers)
                elif how == "times a constant":
                    y = x @ (np.eye(4, dtype=np.float32) @ w).astype(half)
                elif how == "one of two":
                    y = x @ jax.lax.cond(jnp.sum(batch) > 0, lambda w: 1 * w, lambda w: 2 * w, w).astype(half)
                elif how == "used in a branch":
                    y = jax.lax.cond(jnp.sum(batch) > 0, lambda x: x @ w.astype(half), lambda x: x, x)
                elif how == "in a loop in a loop":
                    y = looped(lambda c: jax.lax.scan(lambda c, _: (c + w, None), c, None, length=1)[0], x, zeros)
                else:
                    turn = {
                        "changed by what is carried": lambda c: np.eye(4, dtype=np.float32) @ c + w,
                        "changed by the batch": lambda c: c * (1 + 0 * jnp.mean(batch)) + w,
                        "from zeros": lambda c: c + w,
                    }.get(how, lambda c: 2 * c)
                    start = w if how.startswith("carried") else zeros
                    y = looped(turn, x, start.astype(half if how == "carried in half" else "float32"))
                return jnp.sum(y.astype("float32")), model_state

            return loss_fn

        params, mesh, specs = {"w": jnp.zeros((4, 4))}, mesh_of(kind), {"w": P("fsdp")}
        batch = np.random.default_rng(0).integers(0, 3, (512, 4)).astype(np.float32)
        exact = jax.grad(lambda params: loss_of("float32")(params, None, batch, None)[0])(params)["w"]
        exact = exact.astype("bfloat16").astype("float32") if how == "carried in half" else exact
        state = sharding.init_state(lambda: params, optax.sgd(1.0), mesh, specs)
        state, _ = jaxmp.make_train_step(loss_of("bfloat16"), mesh=mesh, specs=specs)(state, batch)
        np.testing.assert_array_equal(-np.asarray(state.params["w"]), exact)

    def test_what_sums_cotangents_of_a_half_weight_by_itself_is_an_error(self):
        def in_groups(params, model_state, batch, rng):
            weights = params["w"].astype("bfloat16")[None]
            sizes = jnp.full((1,), BATCH, jnp.int32)
            return jnp.mean(jax.lax.ragged_dot(batch.astype("bfloat16"), weights, sizes) ** 2).astype("float32"), None

        def learned_in_a_loop(params, model_state, batch, rng):
            """Each turn makes another weight of it, by the examples."""

            def turn(_, carry):
                x, w = carry
                return x @ w.astype("bfloat16"), w @ (batch.T @ batch)

            x, _ = jax.lax.fori_loop(0, 2, turn, (batch.astype("bfloat16"), params["w"]))
            return jnp.mean(x.astype("float32") ** 2), None

        def of_each_example(params, model_state, batch, rng):  # or a mask on a weight
            x = batch.astype("bfloat16") * params["w"][:BATCH].astype("bfloat16")
            return jnp.mean((x @ params["w"].astype("bfloat16")).astype("float32") ** 2), None

        state = jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of())
        for loss_fn, dtype, name in (
            (in_groups, "bfloat16", "ragged_dot_general"),
            (learned_in_a_loop, "float32", "scan"),
            (of_each_example, "bfloat16", "dot_general"),
        ):
            step = jaxmp.make_train_step(loss_fn, mesh=mesh_of(), specs={"w": P("fsdp")})
            message = f"the gradient of 'w' cannot be reduced in float32: it goes in {dtype} into {name} at "
            with pytest.raises(ValueError, match=message):
                step(state, np.ones((BATCH, WIDTH), np.float32))


class TestErrors:
    def loss(self, params, model_state, batch, rng):
        return jnp.mean((batch @ params["w"]) ** 2), model_state

    def step(self, specs=None, mesh=None, **options):
        return jaxmp.make_train_step(self.loss, mesh=mesh or mesh_of(), specs=specs or {"w": P("fsdp")}, **options)

    def state(self):
        return jaxmp.TrainState.create(params={"w": jnp.ones((WIDTH, WIDTH))}, tx=tx_of())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mesh": True}, r"mesh=, and specs= of params on it, are given together, .* got mesh=Mesh.*specs=None"),
            ({"specs": {"w": P()}}, r"are given together, .* mesh=None, specs=a tree"),
            ({"reduce_dtype": "bfloat16"}, r"and reduce_dtype= and remat='regather' with them, .*'bfloat16'"),
            ({"remat": "regather"}, r"are given together, .* remat='regather'"),
            ({"reduce": "once"}, r"'once' for the microbatches of a step on a mesh, got 'once' with mesh=None"),
            ({"mesh": True, "specs": {}, "reduce": "once"}, r"got 'once' with mesh=Mesh.* and accumulate_steps=1"),
            ({"mesh": True, "specs": {}, "reduce": "twice"}, r"reduce is 'each', or 'once' .* got 'twice'"),
            (
                {"mesh": True, "specs": {}, "reduce_dtype": "float64"},
                r"reduced in float32 \(those of float64 params in float64\) or in a half dtype, got .*float64",
            ),
            (
                {"mesh": True, "specs": {}, "reduce_dtype": "float8_e4m3fn"},
                r"or in a half dtype, got reduce_dtype='float8_e4m3fn'; pass reduce_dtype='float32'",
            ),
            ({"mesh": True, "specs": {}, "reduce_dtype": "int8"}, "dtypes must be floating, got int8"),
        ],
    )
    def test_arguments(self, options, message):
        options = {**options, "mesh": mesh_of()} if "mesh" in options else options
        with pytest.raises(ValueError, match=message):
            jaxmp.make_train_step(self.loss, **options)

    def test_a_mesh_without_axes_for_the_batch(self):
        with pytest.raises(ValueError, match=r"split over the axes 'data' and 'fsdp' .* this one \(x=4\) has none"):
            self.step(mesh=mesh_of(x=4))
        with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, got 4; make it with jax.make_mesh"):
            self.step(mesh=4)

    def test_axes_of_two_types(self):
        kinds = (AxisType.Auto, AxisType.Explicit)
        mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=kinds)
        with pytest.raises(ValueError, match="all be of type Auto or all of type Explicit, got 'data' of type Auto"):
            self.step(mesh=mesh)

    @pytest.mark.parametrize(
        ("specs", "message"),
        [
            ({"v": P()}, r"specs must be a tree of PartitionSpec of the structure of the arrays"),
            ({"w": P("tensor")}, r"which has 'fsdp', got 'tensor'"),
            ({"w": P(None, None, "fsdp")}, r"at most one entry for each axis of the leaf"),
        ],
    )
    def test_specs_that_do_not_fit(self, specs, message):
        with pytest.raises(ValueError, match=message):
            self.step(specs)(self.state(), np.ones((BATCH, WIDTH), np.float32))

    def test_a_batch_that_does_not_divide(self):
        with pytest.raises(
            ValueError, match=r"the 4 devices of 'fsdp' must divide the batch, got 6 .* use a batch of 8"
        ):
            self.step()(self.state(), np.ones((6, WIDTH), np.float32))
        with pytest.raises(ValueError, match=r"must divide the batch, got 0 examples .* use a batch of 4, say"):
            self.step()(self.state(), np.ones((0, WIDTH), np.float32))
        message = (
            r"must divide the batch for each of 2 microbatches, got 12 examples in batch entry 'x'; use .* 16, say"
        )
        with pytest.raises(ValueError, match=message):
            self.step(accumulate_steps=2)(self.state(), {"x": np.ones((12, WIDTH), np.float32)})

    def test_a_state_that_lies_elsewhere(self):
        mesh = mesh_of()
        state = jax.device_put(self.state(), NamedSharding(mesh, P()))
        with pytest.raises(
            ValueError, match=r"a state must lie as .* say, .*spec=P\('fsdp'.* got NamedSharding.*init_state"
        ):
            self.step(mesh=mesh)(state, np.ones((BATCH, WIDTH), np.float32))

    def test_a_state_on_axes_of_another_type(self):
        state = sharding.init_state(lambda: {"w": jnp.ones((WIDTH, WIDTH))}, tx_of(), mesh_of(), {"w": P("fsdp")})
        message = r"a state must lie as .* say, .*axis_types=\(Explicit,.* got .*axis_types=\(Auto,"
        with pytest.raises(ValueError, match=message):
            self.step(mesh=mesh_of(AxisType.Explicit))(state, np.ones((BATCH, WIDTH), np.float32))

    def test_weights_that_the_loss_gathers_by_itself(self):
        def loss_fn(params, model_state, batch, rng):
            return self.loss(sharding.gather(params, {"w": P("fsdp")}, "float32"), model_state, batch, rng)

        step = jaxmp.make_train_step(loss_fn, mesh=mesh_of(AxisType.Explicit), specs={"w": P("fsdp")})
        with pytest.raises(ValueError, match="gathers the weights of its loss function by itself, got gather in it"):
            step(self.state(), np.ones((BATCH, WIDTH), np.float32))

    def test_a_gradient_that_comes_in_half_from_code_of_its_own(self):
        @jax.custom_vjp
        def product(x, w):
            return x @ w

        product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))

        def loss_fn(params, model_state, batch, rng):
            half = product(batch.astype("bfloat16"), params["w"].astype("bfloat16"))
            return jnp.mean(half.astype("float32") ** 2), model_state

        batch, options = np.ones((BATCH, WIDTH), np.float32), {"mesh": mesh_of(), "specs": {"w": P("fsdp")}}
        message = (
            r"the gradient of 'w' cannot be reduced in float32: it goes in bfloat16 into custom_vjp_call at .*py:\d+"
        )
        with pytest.raises(ValueError, match=message):
            jaxmp.make_train_step(loss_fn, **options)(self.state(), batch)
        step = jaxmp.make_train_step(loss_fn, reduce_dtype="bfloat16", **options)
        assert not step(self.state(), batch)[1]["skipped"]


@pytest.mark.skipif(targets.missing() is not None, reason="the packages that compile for a GPU are not installed")
class TestForEightGPUs:
    """Compiled for H200s that are not there."""

    @pytest.mark.parametrize(("how", "loop"), [("linen", False), ("linen", True), ("autocast", True), ("nnx", True)])
    def test_what_a_device_sends_is_the_least(self, how, loop):
        mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
        vocabulary, sequence, width = 2048, 64, 256
        tx = jaxmp.loss_scaling(optax.adamw(1e-3), jaxmp.NoOpLossScale())

        def placed(leaf, spec):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        if how == "nnx":
            sizes = (vocabulary, sequence, 1 + loop, width, 4, loop)
            abstract = nnx.eval_shape(lambda: nnx_models.GPT2(*sizes, rngs=nnx.Rngs(0)))
            graphdef, shapes = nnx.split(jaxmp.nnx.apply_policy(abstract, "mixed_bfloat16"))
            shapes = nnx.as_pure(shapes)

            def loss_fn(params, model_state, batch, rng):
                return nnx.merge(graphdef, params).loss(*batch), model_state
        else:
            model = GPT2(vocabulary, sequence, 1 + loop, 4, width, "full" if loop else "none", loop)
            shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, sequence), jnp.int32))["params"]
            own = model if how == "autocast" else jaxmp.linen.apply_policy(model, "mixed_bfloat16")

            def loss_fn(params, model_state, batch, rng):
                return own.apply({"params": params}, *batch, method="loss"), model_state

        stacked = ["blocks" if how == "nnx" else "h_0"] if loop else None
        specs = sharding.fsdp_specs(shapes, mesh, min_size=8192, stacked=stacked)
        policy = {"policy": "mixed_bfloat16"} if how == "autocast" else {}
        step = jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs, **policy)
        state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), shapes)
        state = jax.tree.map(placed, state, sharding.fsdp_specs(state, mesh, min_size=8192, stacked=stacked))
        batch = 2 * (placed(jax.ShapeDtypeStruct((16, sequence), "int32"), P("fsdp")),)
        found = sharding.collectives(targets.compiled(step, (state, batch), "h200"))
        split = sum(
            leaf.size for leaf, spec in zip(jax.tree.leaves(shapes), sharding.specs_in(specs), strict=True) if spec
        )
        gathers = [row for row in found.rows if row.kind == "all-gather"]
        assert {row.dtype for row in gathers} == {"bfloat16"}
        assert found.wire <= 1.02 * 7.00 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
        reduced = [row for row in found.rows if row.kind == "reduce-scatter"]
        assert {row.dtype for row in reduced} == {"float32"}
        # Positions are summed over the batch, too.
        assert 4 * split <= sum(row.bytes for row in reduced) <= 4 * (split + sequence * width)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_a_weight_of_several_uses_is_gathered_once_in_a_pass(self, kind):
        """Bare, in a call, in a call of a call; XLA keeps none of the forward pass for the backward pass."""
        mesh, width, names = jax.sharding.AbstractMesh((8,), ("fsdp",), (kind,)), 256, "ab"
        layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

        def loss_fn(params, model_state, x, rng):
            for name in 2 * names:
                x = jnp.tanh(layer(jax.jit(layer)(x, params[name]), params[name]) @ params[name].T)
            return jnp.mean(x**2), model_state

        def placed(leaf, spec):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        params = dict.fromkeys(names, jax.ShapeDtypeStruct((width, width), "float32"))
        state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx_of()), params)
        specs = sharding.fsdp_specs(state, mesh, min_size=512)
        state = jax.tree.map(placed, state, specs)
        batch = placed(jax.ShapeDtypeStruct((64, width), "float32"), P("fsdp"))
        step = jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs.params, policy="mixed_bfloat16")
        rows = sharding.collectives(targets.compiled(step, (state, batch), "h200")).rows
        # XLA may put several arrays into one gather.
        gathered = [(row.dtype, row.bytes) for row in rows for _ in range(row.count) if row.kind == "all-gather"]
        assert {dtype for dtype, _ in gathered} == {"bfloat16"}
        assert sum(size for _, size in gathered) == 2 * len(names) * 2 * width**2

    def test_over_an_axis_that_splits_products_go_sums_of_activations_alone(self):
        """A layer split by its columns and one by its rows: no weight, no gradient, no activation is gathered there."""
        mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
        width = 128
        rules = {"*/up": P("fsdp", "tensor"), "*/down": P("tensor", "fsdp")}
        shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
        params = 2 * [{name: jax.ShapeDtypeStruct(size, "float32") for name, size in shapes.items()}]
        tx = jaxmp.loss_scaling(optax.sgd(1e-3), jaxmp.NoOpLossScale())

        def loss_fn(params, model_state, batch, rng):
            for layer in params:
                batch = batch + jnp.tanh(batch @ layer["up"]) @ layer["down"]
            return jnp.mean(batch**2), model_state

        def placed(leaf, spec):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
        specs = sharding.fsdp_specs(state, mesh, rules=rules)
        state = jax.tree.map(placed, state, specs)
        batch = placed(jax.ShapeDtypeStruct((256, width), "float32"), P("fsdp"))
        step = jaxmp.make_train_step(loss_fn, mesh=mesh, specs=specs.params, policy="mixed_bfloat16")
        found = sharding.collectives(targets.compiled(step, (state, batch), "h200"))
        large = [row for row in found.rows if row.bytes > 1000]
        assert {row.kind for row in large if "tensor" in row.axis} == {"all-reduce"}
        assert sum(row.wire for row in large if row.axis == "fsdp") <= 1.01 * sharding.ideal_wire(state.params)
