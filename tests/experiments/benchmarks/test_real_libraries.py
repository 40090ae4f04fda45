"""The benchmark of real libraries: simulated half precision, and the table."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.real_libraries import registry, run
from experiments.benchmarks.real_libraries.simulated import half_everything, half_products

X, W = jax.random.normal(jax.random.key(0), (4, 8)), jax.random.normal(jax.random.key(1), (8, 8))


def rounded(value):
    return value.astype(jnp.bfloat16).astype(jnp.float32)


def in_a_scan(x, w):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) + 1, None), x, length=2)[0]


def in_a_loop_of_examples(x, w):
    def turns(x, count):
        return jax.lax.fori_loop(0, count, lambda _, h: jnp.tanh(h @ w) + 1, x)

    return jax.vmap(turns)(x, jnp.array([2, 2, 2, 2]))


def test_half_products_round_operands_and_half_everything_rounds_all():
    for fun in [in_a_scan, in_a_loop_of_examples]:

        def by_hand(x, w, after):
            return after(jnp.tanh(after(rounded(x) @ rounded(w)))) + 1

        expected = by_hand(by_hand(X, W, lambda value: value), W, lambda value: value)
        np.testing.assert_allclose(half_products(fun, jnp.bfloat16)(X, W), expected, rtol=1e-6)
        expected = rounded(by_hand(rounded(by_hand(X, W, rounded)), W, rounded))
        np.testing.assert_allclose(half_everything(fun, jnp.bfloat16)(X, W), expected, rtol=1e-6)


def test_the_table_has_programs_and_the_libraries_that_are_not_installed(monkeypatch, tmp_path):
    def absent():
        raise AssertionError("a library that is not installed")

    def version(library):
        if library == "nobody-has-this":
            raise importlib.metadata.PackageNotFoundError
        return "1"

    def failing():
        raise TypeError("an argument is gone")

    programs = [
        registry.Program("optax", "two products", lambda: (lambda w: jnp.sum((jnp.tanh(X @ w) @ w) ** 2), W)),
        registry.Program("optax", "old", failing),
        registry.Program("nobody-has-this", "a program", absent),
    ]
    monkeypatch.setattr(run, "programs", lambda: programs)
    monkeypatch.setattr(registry.importlib.metadata, "version", version)
    monkeypatch.chdir(tmp_path)
    result = run.main(run.Config(run_dir=tmp_path / "run", halves=("bfloat16",)))
    (row,) = result["programs"]
    assert row["verdict"] == "" and row["half_share"] == 1
    assert 1e-4 < row["T"][1] < row["N"][1] < 0.1
    assert row["autocast"][1] < 3 * row["T"][1]
    assert result["not_installed"] == ["nobody-has-this"]
    assert result["failed"] == {"optax: old": "TypeError: an argument is gone"}
    assert "not installed: nobody-has-this" in (tmp_path / "run" / "real_libraries.md").read_text()
    assert json.loads((tmp_path / "run" / "real_libraries.json").read_text())["programs"] == [row]


PAPERS = {program.name: program for program in registry.programs() if program.library == registry.PAPER}


@pytest.mark.slow("compiles nine programs in three ways")
@pytest.mark.parametrize("name", PAPERS)
def test_programs_of_papers_meet_the_goal(monkeypatch, name):
    monkeypatch.setattr(run, "half_everything", lambda fun, half: fun)  # the goal does not depend on it
    for row in run.measure(PAPERS[name], ("bfloat16", "float16")):
        assert np.isfinite(row["autocast"]).all()
        assert row["verdict"] == ("ill-conditioned" if (name[:7], row["half"]) == ("ArcFace", "bfloat16") else "")


def test_the_page_counts_the_programs():
    libraries = collections.Counter(program.library for program in registry.programs())
    of_papers = libraries.pop(registry.PAPER)
    page = " ".join((pathlib.Path(__file__).parents[3] / "docs" / "measured.md").read_text().split())
    assert f"{libraries.total()} loss functions" in page and f"{len(libraries)} JAX libraries" in page
    assert f"{of_papers} loss functions of papers" in page
