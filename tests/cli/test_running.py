"""The commands of the tools run the tools, and their arguments are those of the tools."""

import json
from inspect import signature

import pytest

import jaxmp.inspect
from jaxmp.cli import main
from jaxmp.cli.tools import TOOLS

pytestmark = pytest.mark.once

MODULE = """
import jax, jax.numpy as jnp, jaxmp, optax

def loss(params, x):
    with jax.named_scope("layer"):
        return jnp.mean(jnp.exp(x @ params["w"]))

def good():
    return {"w": jnp.ones((8, 8))}, jnp.ones((2, 8))

def bad():
    return {"w": 100 * jnp.ones((8, 8))}, jnp.ones((2, 8))

def state():
    return jaxmp.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1)), jnp.ones((2, 8))

trained = jaxmp.make_train_step(lambda params, model_state, batch, rng: (loss(params, batch), model_state))

half_step = jaxmp.make_train_step(
    lambda params, model_state, batch, rng: (loss(params, batch), model_state), policy="mixed_bfloat16", donate=False
)

def vector():
    return jnp.ones(3)

def text():
    return {"w": jnp.ones((8, 8))}, "x"

def shapes():
    return {"w": jax.ShapeDtypeStruct((8, 8), "float32")}, jnp.ones((2, 8))

def of_seed(seed):
    return good()

arrays = good()

def broken():
    raise OSError("no file")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "planted_for_running.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def _main(command, example, *more):
    return main([command, "planted_for_running:loss", "--args", f"planted_for_running:{example}", *more])


def test_blame_names_the_operation_and_ends_with_1(capsys):
    assert _main("first_nonfinite", "good") == 0
    assert capsys.readouterr().out == "All values are finite, operation by operation and compiled.\n"
    assert _main("first_nonfinite", "bad") == 1
    assert "forward overflow in exp 'layer' (planted_for_running.py:6)" in capsys.readouterr().out
    assert _main("first_nonfinite", "good", "--policy", "mixed_float16", "--loss-scale", "1e9", "--json") == 1
    blame = json.loads(capsys.readouterr().out)
    assert blame["scaled_only"] and blame["phase"] == "backward"


def test_budget_names_the_line_with_the_largest_share(capsys, tmp_path):
    picture = str(tmp_path / "budget.png")
    assert _main("error_budget", "good", "--policy", "mixed_bfloat16", "--plot", picture) == 0
    shown = capsys.readouterr().out
    assert "planted_for_running.py:6" in shown and (tmp_path / "budget.png").stat().st_size
    assert _main("error_budget", "good", "--policy", "mixed_bfloat16", "--json") == 0
    lines = json.loads(capsys.readouterr().out)["by_line"]
    assert any("dot_general" in line["operations"] for line in lines)
    step = ["planted_for_running:half_step", "--args", "planted_for_running:state"]
    assert main(["error_budget", *step]) == 0
    assert "planted_for_running.py:6" in capsys.readouterr().out
    assert _main("error_budget", "good") == 2
    assert "rounds to half precision, but this one does not" in capsys.readouterr().err


def test_compare_names_the_module_in_which_the_error_enters(capsys):
    assert _main("compare", "good", "--policy", "mixed_float16", "--json") == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["entered"] is None and comparison["rows"][0]["path"] == "layer"
    assert _main("compare", "good", "--no-grad", "--reference", "float64") == 0
    assert capsys.readouterr().out.startswith("The error enters nowhere")
    assert _main("compare", "good", "--reference", "planted_for_running:loss") == 0
    assert capsys.readouterr().out.startswith("All compared numbers are equal")


def test_memory_and_audit_run_a_function_under_a_policy(capsys):
    assert _main("audit", "good", "--policy", "mixed_float16", "--no-compile", "--json") == 0
    assert json.loads(capsys.readouterr().out)["products"][0]["operands"] == ["float16", "float16"]
    assert _main("audit", "good", "--overrides", "layer=float32", "--policy", "mixed_float16", "--no-compile") == 0
    capsys.readouterr()
    for command in ("memory", "profile", "first_nonfinite"):
        assert _main(command, "good", "--policy", "mixed_bfloat") == 2
        assert "unknown policy 'mixed_bfloat'" in capsys.readouterr().err


def test_a_train_step_may_have_its_policy_already(capsys):
    for command in ("memory", "numerics", "first_nonfinite"):
        step = [command, "planted_for_running:half_step", "--args", "planted_for_running:state"]
        assert main([*step, "--policy", "mixed_float16"]) == 2
        assert "this train step already has a policy, got policy='mixed_float16'" in capsys.readouterr().err
    step = ["audit", "planted_for_running:trained", "--args", "planted_for_running:state", "--no-compile", "--json"]
    assert main([*step, "--policy", "mixed_bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["products"][0]["operands"] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("name", TOOLS)
def test_a_command_has_the_parameters_of_its_tool_with_their_help(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for parameter in [*signature(getattr(jaxmp.inspect, name)).parameters][1:]:
        if parameter != "tx":
            assert f"--{parameter.replace('_', '-')}" in shown
    assert shown.count("MODULE:FUNCTION") >= 2 and f"jaxmp {name} " in shown


def test_a_loss_scale_that_a_tool_refuses_is_an_error_of_one_line(capsys):
    for command, text in (("numerics", "3"), ("first_nonfinite", "-1"), ("first_nonfinite", "inf")):
        assert _main(command, "good", f"--loss-scale={text}") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"jaxmp {command}: error: loss_scale must be a p") and error.count("\n") == 1


def test_wrong_arguments_are_named(capsys):
    for arguments, text in (
        (
            ("first_nonfinite", "vector"),
            "loss takes (params, x), got 1 from --arg or --args: missing a required argument: 'x'",
        ),
        (
            ("compare", "arrays"),
            "returns the arguments, got planted_for_running:arrays of type 'tuple'; write e.g.",
        ),
        (("numerics", "of_seed"), "a function without parameters that returns the arguments, got planted_for_running"),
        (
            ("compare", "good", "--overrides", "layer"),
            "an override must be KEY=LEVEL, such as '**/head=float32', got 'layer'",
        ),
        (("compare", "good", "--reference", "half"), "reference must be one of 'float32', 'float64', got 'half'"),
    ):
        assert _main(*arguments) == 2
        assert text in capsys.readouterr().err


def test_errors_of_the_users_code_end_with_2_and_the_traceback(capsys):
    for command, example, error in (
        ("first_nonfinite", "text", TypeError),
        ("first_nonfinite", "broken", OSError),
        ("audit", "broken", OSError),
    ):
        assert _main(command, example) == 2
        assert f"{error.__name__}: " in capsys.readouterr().err


def test_tune_saves_a_policy(capsys):
    assert _main("tune", "good", "--policy", "mixed_bfloat16", "--no-operations", "--save", "policy.txt") == 0
    assert "Nothing needs float32" in capsys.readouterr().out
    with open("policy.txt") as file:
        assert file.read() == "params=float32,compute=bfloat16,output=float32\n"
    assert _main("tune", "good", "--policy", "mixed_bfloat16", "--seeds", "2") == 2
    assert "typed PRNG keys" in capsys.readouterr().err
