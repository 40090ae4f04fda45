"""tune, error_budget and compare measure one error, and give one advice."""

from __future__ import annotations

import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import ROOT

import jaxmp
from jaxmp.inspect import compare, error_budget, tune

pytestmark = pytest.mark.once

PAGES = {  # where the model of each page ends, and its batch begins and ends
    "budget": ("model = Net()", "x = np.random.default_rng(0)", "params ="),
    "compare": ("def compare(", "x = np.random.default_rng(0)", "params ="),
}


def model_and_batch(page):
    text = (ROOT / "docs" / "tools" / f"{page}.md").read_text(encoding="utf-8")
    code = textwrap.dedent(re.search(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)[1])
    end_of_model, batch, end = PAGES[page]
    names = {"__name__": page}
    exec(code[: code.index(end_of_model)] + code[code.index(batch) : code.index(end)], names)
    return names["Net"](), names["batch"]


@pytest.mark.slow("measures the model of each page with three tools")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("page", PAGES)
def test_the_tools_advise_the_same_for_the_model_of_a_page_and_keep_their_promise(page):
    model, batch = model_and_batch(page)
    params = model.init(jax.random.key(0), batch["x"])["params"]

    def loss_fn(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    def gradient(fun):
        grads = jax.jit(jax.grad(fun), compiler_options={"xla_allow_excess_precision": False})(params, batch)
        return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(grads)])

    def error(overrides):
        exact = gradient(loss_fn)
        half = gradient(jaxmp.autocast(loss_fn, "mixed_bfloat16", overrides))
        return np.linalg.norm(half - exact) / np.linalg.norm(exact)

    advice = {"Net/flow:add": "float32"}
    tuned = tune(loss_fn, "mixed_bfloat16")(params, batch)
    budget = error_budget(loss_fn, "mixed_bfloat16")(params, batch)
    comparison = compare(loss_fn, "mixed_bfloat16")(params, batch)
    assert {key: level for key, level in tuned.overrides.items() if level == "float32"} == advice
    assert 'Add the override {"Net/flow:add": "float32"}' in budget.sentences[-1]
    assert comparison.entered == "Net/flow"
    before = error({})
    for measured in (tuned.error_before, budget.measured.gradient_error, comparison.total.relative_error):
        assert measured == pytest.approx(before, rel=0.02)
    promised = float(budget.sentences[-1].partition(" to ")[2].partition(" %")[0]) / 100
    assert promised == pytest.approx(error(advice), rel=0.2)
    assert tuned.error == pytest.approx(error(tuned.overrides), rel=0.2)
