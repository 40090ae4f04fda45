"""The code of the README and the guide runs as printed; both stay short."""

from __future__ import annotations

import re

import jax
import pytest
from places import ROOT


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_examples_of_the_readme_the_inspect_page_and_the_guide_run_as_printed_and_learn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = _blocks("README.md")
    blocks = _blocks("docs/guide.md")
    own_step, with_statistics, with_dropout, in_nnx, nnx_step_of_jaxmp, *others = blocks
    bridged, decoding, unedited, less, float8, assumed = others
    scope: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam is not strict about dtypes
        exec(example, scope)
        printed = capsys.readouterr().out
        before = jax.tree.map(str, scope["state"])
        exec(_blocks("docs/inspect.md")[0], dict(scope))
        shown = capsys.readouterr().out
        assert jax.tree.map(str, scope["state"]) == before  # the tools change nothing
        exec(own_step, scope)
        state, batch, step = scope["state"], scope["batch"], scope["step"]
        params, opt_state, loss = step(state.params, state.opt_state, batch)
        exec(with_statistics, scope)
        own_statistics = scope["opt_state"], scope["statistics"]
        own_scope = dict(scope)
        printed += capsys.readouterr().out
        exec(with_dropout, own_scope)
        assert float(capsys.readouterr().out.split()[1]) > 0.9
        exec(in_nnx, scope)
        net, optimizer, nnx_step = scope["net"], scope["optimizer"], scope["step"]
        nnx_losses = [nnx_step(net, optimizer, batch) for _ in range(3)]
        exec(nnx_step_of_jaxmp, scope)
        assert float(scope["metrics"]["loss"]) < float(nnx_losses[2]) and int(optimizer.step[...]) == 4
        assert re.fullmatch(r"loss 0\.0\d+, loss scale 32768, skipped 0\n", printed + capsys.readouterr().out)
        exec(bridged, scope)
        variables = scope["model"].init(jax.random.key(0), jax.numpy.ones((1, 784)))
        assert variables["params"]["kernel"].shape == (784, 256)
        assert scope["wrapped"].kernel.shape == (784, 256)
        exec(decoding, scope)
        assert capsys.readouterr().out == "bfloat16 float32\n"
        exec(unedited, scope)
        plan = capsys.readouterr().out
        exec(less, scope)
        assert "nu/w: bfloat16, rounded stochastically" in capsys.readouterr().out
        exec(float8, scope)
        exec(assumed, scope)
        assert capsys.readouterr().out == "float8(accumulate=precise,min_dim=1024)\nTrue\n"
    assert "2 products" not in shown and shown.count("The error enters") == 3 and "\nNone\n" in shown
    assert "No policy, region or autocast" not in shown and "worst: 0.00e+00" not in shown
    assert plan.count("\ndot_general") == 2 and "logsumexp" in plan
    assert {leaf.dtype.name for leaf in jax.tree.leaves(scope["grads"])} == {"float32"}
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    assert float(loss) < 0.1 and int(opt_state.skipped) == 0
    assert int(own_statistics[0].skipped) == 0 and bool((own_statistics[1]["BatchNorm_0"]["mean"] != 0).any())
    assert float(nnx_losses[2]) < float(nnx_losses[0]) and int(optimizer.skipped) == 0
    assert net.layers[0].dtype == "float16" and net.layers[1].dtype == "float32"


def test_the_first_pages_stay_short():
    assert (ROOT / "README.md").stat().st_size <= 8192 and (ROOT / "CONTRIBUTING.md").stat().st_size <= 3000


def test_every_link_between_pages_leads_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("jaxmp/**/*.md"),
        *ROOT.glob("experiments/benchmarks/*.md"),
    ]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page}: {link}"
