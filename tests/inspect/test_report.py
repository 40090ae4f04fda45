"""The page of a run: its record, its sections, its verdict and its safety."""

from __future__ import annotations

import json
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen_zoo import numbers

import jaxmp
from jaxmp.cli import main
from jaxmp.inspect import Watch, audit, memory, record, write_report
from jaxmp.inspect._report import charts
from jaxmp.inspect._report.reading import read_run
from jaxmp.inspect._report.report import verdict

pytestmark = pytest.mark.once

pytest.importorskip("jinja2")

X = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record 30 steps in float16, with a plan, memory and watched steps."""
    folder = tmp_path_factory.mktemp("runs") / "half <b>"
    model = jaxmp.linen.apply_policy(nn.Dense(8, use_bias=False), "mixed_float16")

    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(model.apply({"params": params}, batch) ** 2), model_state

    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale(2.0**20))
    state = jaxmp.TrainState.create(params=numbers(jax.eval_shape(model.init, jax.random.key(0), X))["params"], tx=tx)
    step = jaxmp.make_train_step(loss_fn, donate=False)
    watch = Watch(step, every=10)
    with record(folder) as run:
        run.watch(watch)
        run.plan(audit(step, "mixed_float16", compile=False)(state, X))
        run.memory(memory(step)(state, X))
        for n in range(1, 31):
            state, metrics = watch(n, state, X)
            run.log(n, metrics)
        run.log(30, {"loss": metrics["loss"]}, "test")
        run.summary(ms_per_step=2.0, policy="mixed_float16")
    return folder


def _run(folder: Path, losses: list[float], **summary: object) -> Path:
    with record(folder) as run:
        for n, loss in enumerate(losses):
            run.log(n, {"loss": loss, "loss_scale": 8.0, "skipped": n == 1, "grad_norm": 1.0})
        run.summary(**summary)
    return folder


def test_a_page_has_every_section_and_asks_no_network(recorded: Path) -> None:
    page = write_report(recorded)
    text = page.read_text()
    assert page == recorded / "report.html" and text.count("<svg") == 5 and "missing" not in text.split("<body>")[1]
    assert "<th>policy</th><td><code>mixed_float16</code>" in text
    assert "100.0 % of the products' FLOPs are in 16 bits or fewer." in text
    assert "<td>Dense</td>" in text and "dot_general" in text and "at the peak" in text and "jaxmp " in text
    assert "half &lt;b&gt;" in text and "half <b>" not in text
    assert all("www.w3.org" in url for url in re.findall(r"https?://[\w./-]+", text))
    assert "src=" not in text and "@import" not in text


def test_the_memory_of_all_runs_that_have_a_plan_is_drawn(recorded: Path, tmp_path: Path) -> None:
    runs = [read_run(recorded), read_run(_run(tmp_path / "metrics alone", [1.0]))]
    names = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", charts.memory(runs))
    assert {"half &lt;b&gt;", "KiB at the peak", "params"} <= {*names} and "metrics alone" not in names


def test_runs_in_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [_run(tmp_path / parent / "run", [1.0]) for parent in ("first", "second")]
    text = write_report(folders[0], against=folders[1:]).read_text()
    assert "first/run" in text and "second/run" in text


def test_a_watch_may_be_recorded_before_or_after_the_loop(recorded: Path, tmp_path: Path) -> None:
    assert [row["step"] for row in read_run(recorded).watched] == [10, 20, 30]
    watch = Watch(lambda params, x: jnp.sum(x * params), every=2)
    with record(tmp_path) as run:
        for n in range(1, 7):
            watch(n, jnp.float32(2), jnp.ones(3))
            run.log(n, {"loss": 6.0})
        assert list(watch.steps) == [2, 4, 6]
        run.watch(watch)
    assert [row["step"] for row in read_run(tmp_path).watched] == [2, 4, 6]


def test_a_chart_fits_a_phone_and_its_ticks_are_plain_numbers(tmp_path: Path) -> None:
    with record(tmp_path) as run:
        for n in range(20):
            run.log(n, {"loss": 1.0, "grad_norm": 1.5 + 0.05 * n})
    text = write_report(tmp_path).read_text()
    ticks = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", charts.scales(read_run(tmp_path)))
    assert {"1.6", "2"} <= {*ticks} and not any("×" in tick or "mathdefault" in tick for tick in ticks)
    (rule,) = re.findall(r"\bsvg \{([^}]*)\}", text)
    assert "width: 100%" in rule and "min-width" not in rule
    assert all(float(width) < 420 for width in re.findall(r'viewBox="0 0 ([\d.]+)', text))  # about one pixel each


NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "held_out", "words"),
    [
        ([0.1] * 12, {}, "half reaches the loss of full"),
        ([0.2] * 12, {}, "half does not reach the loss of full"),
        ([0.1] + [NAN] * 11, {}, "half does not reach the loss of full: it diverged"),
        ([0.1] + [NAN] * 11, {"test_loss": 0.1}, "half reaches the loss of full"),
        ([0.1] * 12, {"test_loss": NAN, "test_accuracy": NAN}, "it diverged"),
    ],
)
def test_the_verdict_compares_with_the_first_other_run(tmp_path, losses, held_out, words):
    full = read_run(_run(tmp_path / "full", [1.0, 0.1], ms_per_step=4.0, test_loss=0.1))
    half = read_run(_run(tmp_path / "half", losses, ms_per_step=2.0, platform="gpu", **held_out))
    sentence = verdict(half, [full])
    assert words in sentence and ("a step takes 2 ms instead of 4 ms" in sentence) == ("diverged" not in words)
    assert "a CPU does not show gains" in verdict(full, [full])


@pytest.mark.parametrize(("other", "words"), [(0.0, "0.5 and 0 (at most"), (-1.0, "0.5 and -1 (+150.0 %;")])
def test_a_loss_may_be_zero_or_negative(tmp_path: Path, other: float, words: str) -> None:
    full, half = (_run(tmp_path / name, [1.0], test_loss=loss) for name, loss in (("full", other), ("half", 0.5)))
    assert words in verdict(read_run(half), [read_run(full)])


def test_seeds_are_compared_by_their_mean_and_their_spread(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.10, 0.12)):
        _run(tmp_path / "full" / f"seed{seed}", [loss] * 3, test_accuracy=0.5 + loss)
        _run(tmp_path / "half" / f"seed{seed}", [loss + 0.01] * 3)
    text = write_report(tmp_path / "half", [tmp_path / "full"], tmp_path / "page.html").read_text()
    assert "half reaches the loss of full: 0.12 and 0.11 (+9.1 %" in text and "over 2 seeds" in text
    assert "half (2 seeds)" in text and "0.11 ± 0.014" in text and "61.00% ± 1.41%" in text


def test_a_long_run_with_a_large_plan_stays_below_two_megabytes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random(10_000)
    rows = "".join(f"{n},train,{noise[n]},,{n + noise[n]},1024,{n % 100 == 0:d}\n" for n in range(10_000))
    (tmp_path / "metrics.csv").write_text("step,split,loss,accuracy,grad_norm,loss_scale,skipped\n" + rows)
    row = {"path": "Net/block/attention", "primitive": "dot_general", "operands": ["float16"] * 2, "result": "float16",
           "flops": 10**9, "why": "product", "source": "model.py:10"}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps({"rows": [row] * 5_000}))
    assert write_report(tmp_path).stat().st_size < 2e6


def test_the_command_writes_a_page_that_says_how_to_get_what_a_run_lacks(tmp_path: Path, capsys) -> None:
    run = _run(tmp_path / "run", [1.0, 0.5])
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    for words in ("--watch 100", "run.plan(", "run.memory(", "Name a float32 run with --against"):
        assert words in text
    assert "nan" not in text.split("<body>")[1]  # no accuracy was logged


def test_the_command_refuses_other_folders(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path)]) == 2 and "metrics.csv" in capsys.readouterr().err
