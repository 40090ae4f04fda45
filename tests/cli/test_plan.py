from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp.cli import main

pytestmark = pytest.mark.once

MATMUL = ("jax.numpy:matmul", "--arg", "float32[8,16]", "--arg", "float32[16,4]")
MODULE = """
import jax, jax.numpy as jnp, numpy as np

def loss(params, x):
    with jax.named_scope("head"):
        return jnp.sum(x @ params["w"])

def example():
    return {"w": jnp.zeros((1 << 20, 1 << 20))}, jnp.zeros((4, 1 << 20))

def matrix():
    return jnp.zeros((4, 4))

def kernel(x, params):
    return x.astype(params["w"].dtype) @ params["w"]

def square(x):
    return x @ x

def dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ x.T @ x, 0)

def fails(x):
    raise RuntimeError("first line\\nsecond line")

def branches(x):
    if x[0] > 0:
        return x
    return -x

def by_keyword(x, *, w, scale=1):
    return scale * (x @ w)

def texts():
    return jnp.zeros((4, 4)), {"mode": ["fast"]}

def shapes():
    return jax.ShapeDtypeStruct((8, 8), "float32"), {"w": jax.ShapeDtypeStruct((8, 8), "float64")}

def doubles():
    return np.ones((8, 8)), {"w": np.ones((8, 8))}

def no_data():
    raise ValueError("no data")

def of_seed(seed):
    return jnp.zeros((4, 4))

arrays = doubles()

class Model:
    @staticmethod
    def apply(x):
        return x @ x

import flax.linen as nn, flax.nnx as nnx, jaxmp, optax

dense = nn.Dense(3)
Layer = nnx.Linear

def loss_of_step(params, model_state, batch, rng):
    with jax.named_scope("head"):
        return jnp.sum(batch @ params["w"]), model_state

def state_and_batch():
    tx = jaxmp.loss_scaling(optax.sgd(1e-3), jaxmp.DynamicLossScale())
    params = {"w": jnp.zeros((8, 8))}
    return jaxmp.TrainState.create(params=params, tx=tx, rng=0), jnp.zeros((8, 8))

def loss_of_model(model, batch):
    return jnp.sum(model(batch))

def model_optimizer_and_batch():
    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    return model, jaxmp.nnx.Optimizer(model, optax.sgd(1e-3)), jnp.zeros((8, 8))

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
step = jaxmp.make_train_step(loss_of_step)
accumulating = jaxmp.make_train_step(loss_of_step, accumulate_steps=2)
on_mesh = jaxmp.make_train_step(loss_of_step, sharding=jaxmp.sharding.Sharding(mesh))
of_model = jaxmp.nnx.make_train_step(loss_of_model, policy="mixed_bfloat16")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with modules of a user."""
    (tmp_path / "plan_cli_module.py").write_text(MODULE)
    (tmp_path / "plan_cli_broken.py").write_text("import plan_cli_absent\n")
    (tmp_path / "plan_cli_crash.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("plan_cli_")]:
        del sys.modules[name]


def error(capsys, *arguments) -> str:
    """Assert that ``jaxmp plan`` stops with a one-line error, and return it."""
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxmp plan: error: ") and err.count("\n") == 1
    return err.removeprefix("jaxmp plan: error: ").rstrip("\n")


def test_the_example_of_the_help_works(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    command = re.search(r"^ +jaxmp (plan .*)$", capsys.readouterr().out, re.MULTILINE)[1]
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "(no scope)" in out and "FLOPs: 1024, 100.0 % in half precision" in out


def test_the_text_is_the_short_form_and_with_operations_the_whole_plan(capsys):
    command = ["plan", *MATMUL, "--policy", "mixed_float16", "--overrides", "primitive:dot_general=half"]
    overrides = {"primitive:dot_general": "half"}
    plan = jaxmp.cast_plan(jnp.matmul, "mixed_float16", overrides)(jnp.ones((8, 16)), jnp.ones((16, 4)))
    assert main(command) == 0
    assert capsys.readouterr().out == f"{plan.by_module}\n--operations shows each operation, and the casts\n"
    assert main([*command, "--operations"]) == 0
    assert capsys.readouterr().out == f"{plan}\n"


def test_json_is_that_of_the_plan(capsys):
    assert main(["plan", *MATMUL, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["summary"]["product_flops"] == 1024 and read["rows"][0]["operands"] == ["bfloat16", "bfloat16"]


def test_a_terminal_gets_a_table_that_fits(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["plan", *MATMUL, "--operations"]) == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert lines[0].startswith("autocast plan under")
        assert any(re.match(r"dot_general +2×bfloat16 -> bfloat16 .* product", line) for line in lines)
        assert "FLOPs: 1024, 100.0 % in half" in " ".join(map(str.strip, lines))
        assert max(map(len, lines)) <= columns


def test_a_module_of_the_current_folder_is_planned_without_making_its_arguments(here, capsys):
    assert main(["plan", "plan_cli_module:loss", "--args", "plan_cli_module:example", "--operations"]) == 0
    out = capsys.readouterr().out
    assert f"FLOPs of products: {2 * 4 << 40}, 100.0 % in half precision" in out
    assert "head | product | plan_cli_module.py:6" in out
    assert str(here) not in out and str(here) not in sys.path
    assert main(["plan", "plan_cli_module:square", "--args", "plan_cli_module:matrix"]) == 0
    assert main(["plan", "plan_cli_module:Model.apply", "--arg", "f32[4, 4]"]) == 0
    assert main(["plan", "plan_cli_module:dropout", "--arg", "key[]", "--arg", "bf16[4,4]"]) == 0


@pytest.mark.parametrize("step", ["step", "accumulating", "on_mesh", "of_model"])
def test_the_plan_of_a_train_step_is_that_of_its_loss_function(here, capsys, step):
    example = "model_optimizer_and_batch" if step == "of_model" else "state_and_batch"
    assert main(["plan", f"plan_cli_module:{step}", "--args", f"plan_cli_module:{example}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["rows"]) < 10 and "dot_general" in [row["primitive"] for row in plan["rows"]]
    assert plan["summary"]["product_flops"] == plan["summary"]["half_product_flops"] == 2 * 8 * 8 * 8


def test_an_argument_may_be_any_dtype_and_shape(capsys):
    for text in ("float32", "float32[]", "int32[3]", "bool[2,2]", "uint8[1]", "float16[0,3]"):
        function = "jax.numpy:negative" if "bool" not in text else "jax.numpy:logical_not"
        assert main(["plan", function, "--arg", text, "--operations"]) == 0
        dtype = text.partition("[")[0]
        assert re.search(rf"^\w+ +{dtype} -> {dtype} ", capsys.readouterr().out, re.MULTILINE)


def test_an_invalid_shape_is_an_error(capsys):
    for text in ("float32[", "float32[8,]", "float32[8 16]", "[8]", "float32[-1]", "float32[a]", ""):
        expected = f"an --arg must be a dtype and a shape, such as float32[8,16] or int32[], got {text!r}"
        assert error(capsys, "jax.numpy:negative", "--arg", text) == expected


def test_a_missing_name_is_an_error_with_the_nearest_name(here, capsys):
    assert error(capsys, "jax.numpi:matmul").startswith("there is no module 'jax.numpi' in the current folder")
    assert error(capsys, "nowhere.at.all:f").startswith("there is no module 'nowhere' in the current folder")
    assert error(capsys, "jax.numpy:matmull").startswith("'jax.numpy' has no 'matmull'; nearest: 'matmul'")
    assert error(capsys, "jax.numpy:pi") == "a function is needed, got jax.numpy:pi of type 'float'"
    rule = "--args must name a function without parameters that returns the arguments, got plan_cli_module"
    remedy = "write e.g. def arguments(): return params, batch"
    for name, came in (("arrays", "of type 'tuple'"), ("square", "(x)")):
        message = error(capsys, "plan_cli_module:square", "--args", f"plan_cli_module:{name}")
        assert message.startswith(f"{rule}:{name}") and came in message and message.endswith(remedy)
    rule = "write a function as MODULE:FUNCTION, such as jax.numpy:matmul, got"
    for name in ("matmul", "jax.numpy", ":f", "jax.numpy:", "./sub:f"):
        assert error(capsys, name) == f"{rule} {name!r}"
    rule = "write a module, not a file:"
    for name, module in (("plan_cli_module.py", "plan_cli_module:FUNCTION"), ("./sub/other.py:f", "sub.other:f")):
        assert error(capsys, name) == f"{rule} {module}, got {name!r}"
    assert "unknown dtype 'float23'" in error(capsys, "jax.numpy:negative", "--arg", "float23[8]")


def test_a_module_in_place_of_a_function_is_refused(here, capsys):
    for name, cls in (("dense", "an instance of Dense"), ("Layer", "the class Linear")):
        assert f"takes a function of arrays, got {cls}" in error(
            capsys, f"plan_cli_module:{name}", "--arg", "float32[4,4]"
        )


def test_wrong_arguments_are_named_with_pythons_own_error(here, capsys):
    for function, takes, missing in (("loss", "params, x", "x"), ("by_keyword", "x, w, scale", "w")):
        text = error(capsys, f"plan_cli_module:{function}", "--arg", "float32[8]")
        assert text.startswith(f"plan_cli_module:{function} takes ({takes}), got 1 from --arg or --args: missing")
        assert text.endswith(f"argument: {missing!r}")
    assert error(capsys, "plan_cli_module:matrix", "--arg", "float32[8]").endswith("too many positional arguments")
    text = error(capsys, "plan_cli_module:square", "--arg", "f32[4,4]", "--args", "plan_cli_module:matrix")
    assert text == "the arguments come from --arg or from --args, got both"


def test_errors_of_the_users_code_end_with_2_and_the_traceback(here, capsys):
    for arguments, kind, phrase in (
        (("jax.numpy:matmul", "--arg", "float32[8]", "--arg", "float32[9]"), TypeError, "dot_general"),
        (("plan_cli_module:fails", "--arg", "float32[8]"), RuntimeError, "second line"),
        (("plan_cli_module:branches", "--arg", "float32[8]"), jax.errors.TracerBoolConversionError, "bool"),
        (("plan_cli_module:square", "--args", "plan_cli_module:no_data"), ValueError, "no data"),
        (("plan_cli_module:square", "--args", "plan_cli_module:texts"), TypeError, "str"),
        (("plan_cli_broken:f",), ModuleNotFoundError, "plan_cli_absent"),
        (("plan_cli_crash:f",), ZeroDivisionError, "division"),
    ):
        assert main(["plan", *arguments]) == 2
        err = capsys.readouterr().err
        assert f"{kind.__name__}: " in err and phrase in err, err


def test_jax_warns_of_a_dtype_that_it_narrows(capsys):
    for wide, narrow in (("int64", "int32"), ("uint64", "uint32"), ("complex128", "complex64"), ("f64", "float32")):
        name = wide.replace("f64", "float64")
        with pytest.warns(UserWarning, match=f"requested dtype {name} .* will be truncated to dtype {narrow}"):
            assert main(["plan", "jax.numpy:negative", "--arg", f"{wide}[4]", "--operations"]) == 0
        assert f"{narrow} -> {narrow}" in capsys.readouterr().out
        with jax.enable_x64(True):
            assert main(["plan", "jax.numpy:negative", "--arg", f"{wide}[4]", "--operations"]) == 0
        assert f"{name} -> {name}" in capsys.readouterr().out


def test_policies_and_overrides_are_refused_as_autocast_refuses_them(capsys):
    assert error(capsys, *MATMUL, "--policy", "mixed").startswith("unknown policy 'mixed'")
    assert error(capsys, *MATMUL, "--policy", "float32").startswith("cast_plan needs a policy with a half compute")
    assert error(capsys, *MATMUL, "--policy", "O2").startswith("a function under autocast has no modules")
    assert "matched none" in error(capsys, *MATMUL, "--overrides", "**/head=float32")
    assert "names a primitive that does not exist" in error(capsys, *MATMUL, "--overrides", "primitive:expo=half")
    assert "'tensorfloat32', 'half'" in error(capsys, *MATMUL, "--overrides", "primitive:exp=fully")
    assert error(capsys, *MATMUL, "--overrides", "head") == (
        "an override must be KEY=LEVEL, such as '**/head=float32', got 'head'"
    )
