"""The README's code runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_of_the_readme_run_as_printed_and_learn(capsys: pytest.CaptureFixture[str]) -> None:
    example, own_step, in_nnx, nnx_step_of_jaxmp, unedited = re.findall(
        r"```python\n(.*?)```", README.read_text(), re.DOTALL
    )
    scope: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam is not strict about dtypes
        exec(example, scope)
        exec(own_step, scope)
        state, batch, step = scope["state"], scope["batch"], scope["step"]
        params, opt_state, loss = step(state.params, state.opt_state, batch)
        exec(in_nnx, scope)
        net, optimizer, nnx_step = scope["net"], scope["optimizer"], scope["step"]
        nnx_losses = [nnx_step(net, optimizer, batch) for _ in range(3)]
        exec(nnx_step_of_jaxmp, scope)
        assert float(scope["metrics"]["loss"]) < float(nnx_losses[2]) and int(optimizer.step[...]) == 4
        assert re.fullmatch(r"loss 0\.0\d+, loss scale 32768, skipped 0\n", capsys.readouterr().out)
        exec(unedited, scope)
        plan = capsys.readouterr().out
    assert plan.count("\ndot_general") == 2 and "cross-entropy" in plan
    assert {leaf.dtype.name for leaf in jax.tree.leaves(scope["grads"])} == {"float32"}
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    assert float(loss) < 0.1 and int(opt_state.skipped) == 0
    assert float(nnx_losses[2]) < float(nnx_losses[0]) and int(optimizer.skipped) == 0
    assert net.layers[0].dtype == "float16" and net.layers[1].dtype == "float32"
