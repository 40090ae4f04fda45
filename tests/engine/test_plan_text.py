"""The plan as text, JSON and a table, and the errors of cast_plan."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_tools import MLP, looped, mlp, plan, shape

import jaxmp
from jaxmp.engine.plan import PlanRow

pytestmark = pytest.mark.once


def test_json_has_all_data_of_the_plan():
    cast_plan = plan(looped, shape(4, 8), shape(8, 8))
    read = json.loads(cast_plan.to_json())
    assert set(read) == {"policy", "overrides", "rows", "summary"}
    restored = [PlanRow(**{**row, "operands": tuple(row["operands"])}) for row in read["rows"]]
    assert tuple(restored) == cast_plan.rows
    assert read["summary"] == json.loads(json.dumps(vars(cast_plan.summary)))
    assert read["policy"] == str(jaxmp.get_policy("mixed_bfloat16"))


def test_the_short_form_has_a_row_for_each_module():
    def net(params, x):
        for n, w in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return jnp.sum(x @ params["head"], axis=-1)

    params = {"layers": [shape(8, 8)] * 3, "head": shape(8, 2)}
    cast_plan = plan(net, params, shape(4, 8), overrides={"head": "float32"})
    rows = cast_plan.by_module.rows
    layers = [(f"layer_{n}", {"bfloat16": 1}, ("bfloat16",)) for n in range(2)]
    last = ("layer_2", {"bfloat16": 1}, ("float32",))  # the head reads its tanh in float32
    assert [(row.path, row.products, row.others) for row in rows] == [
        *layers, last, ("head", {"float32": 1}, ("float32",))
    ]  # fmt: skip
    assert [row.why for row in rows] == ["product"] * 3 + ["override 'head'"]
    assert sum(row.flops_share for row in rows) == pytest.approx(1)
    of_head = sum(row.flops for row in cast_plan.rows if row.path == "head")
    assert rows[-1].flops_share == of_head / cast_plan.summary.flops
    title, shares, _, _, *lines = str(cast_plan.by_module).splitlines()[-7:]
    assert (title, len(lines)) == ("override 'head': float32", 3) and shares in str(cast_plan)
    assert re.sub(" +", " ", lines[0]).startswith("layer_* 2 1 bfloat16 bfloat16 ")


# --- nothing runs, overrides, errors


def test_a_plan_takes_arrays_python_values_and_keywords():
    def fun(x, transpose, *, w, name):
        assert transpose is True and name == "w"
        return x @ w.T

    cast_plan = jaxmp.cast_plan(fun, "mixed_float16")(np.ones((2, 8), np.float32), True, w=jnp.ones((8, 8)), name="w")
    assert cast_plan.rows[-1].operands == ("float16", "float16")


def test_a_plan_gives_overrides_and_regions_as_reasons():
    def fun(x, w):
        with jax.named_scope("a"):
            y = lax.exp(x @ w)
        with jaxmp.precision("float32"):
            return y @ w

    cast_plan = plan(fun, shape(4, 8), shape(8, 8), overrides={"primitive:exp": "half"})
    exp, last = cast_plan.rows[1:]
    assert (exp.path, exp.operands, exp.why) == ("a", ("bfloat16",), "override 'primitive:exp'")
    assert (last.path, last.operands, last.why) == ("", ("float32",) * 2, "region jaxmp.precision('float32')")
    assert "override 'primitive:exp': half" in str(cast_plan)


def test_errors_are_those_of_autocast():
    with pytest.raises(ValueError, match=r"every override must match an operation, but '\*\*/heed' matched none"):
        plan(mlp, *MLP, overrides={"**/heed": "float32"})
    with pytest.raises(ValueError, match="cast_plan needs a policy with a half compute dtype, got float32"):
        jaxmp.cast_plan(mlp, "float32")


def test_a_plan_without_arguments_says_how_to_call_it():
    without_arguments = jaxmp.cast_plan(mlp, "mixed_bfloat16")
    assert repr(without_arguments) == "<cast_plan of mlp: call it with the arguments of mlp, cast_plan(mlp)(...)>"
    with pytest.raises(AttributeError, match=r"no 'rows'; write cast_plan\(mlp\)\(...\).rows"):
        without_arguments.rows  # noqa: B018
