"""``jaxmp blame`` and ``jaxmp compare``."""

import json

import pytest

from jaxmp.cli import main

MODULE = """
import jax, jax.numpy as jnp

def loss(params, x):
    with jax.named_scope("layer"):
        return jnp.mean(jnp.exp(x @ params["w"]))

def good():
    return {"w": jnp.ones((8, 8))}, jnp.ones((2, 8))

def bad():
    return {"w": 100 * jnp.ones((8, 8))}, jnp.ones((2, 8))

def one():
    return jnp.ones(3)

def broken():
    raise OSError("no file")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "planted_for_running.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def _main(command, example, *more):
    return main([command, "planted_for_running:loss", "--args", f"planted_for_running:{example}", *more])


def test_blame(capsys):
    assert _main("blame", "good") == 0
    assert capsys.readouterr().out == "All is finite.\n"
    assert _main("blame", "bad") == 1
    assert "forward overflow in exp 'layer' (planted_for_running.py:6)" in capsys.readouterr().out
    assert _main("blame", "good", "--policy", "mixed_float16", "--loss-scale", "1e9", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["scaled_only"] and found["phase"] == "backward"


def test_compare(capsys):
    assert _main("compare", "good", "--policy", "mixed_float16", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entered"] is None and found["rows"][0]["path"] == "layer"
    assert _main("compare", "good", "--no-grad", "--reference", "float64") == 0
    assert capsys.readouterr().out.startswith("The error enters nowhere")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("blame", "one"), "loss takes (params, x), got 1 by --arg or --args: missing a required argument: 'x'"),
        (("blame", "broken"), "planted_for_running:broken failed: OSError: no file"),
        (
            ("compare", "good", "--override", "layer"),
            "an --override is KEY=LEVEL, such as '**/head=float32', got 'layer'",
        ),
        (("compare", "good", "--reference", "half"), "a reference is 'float32' or 'float64', got 'half'"),
    ],
)
def test_what_is_wrong_with_the_arguments(capsys, arguments, text):
    assert _main(*arguments) == 2
    assert text in capsys.readouterr().err
