"""The reference shows the public names, each with its docstring."""

from __future__ import annotations

import importlib
import inspect

import pytest

import jaxmp


@pytest.mark.parametrize("name", ["jaxmp", "jaxmp.inspect", "jaxmp.linen", "jaxmp.nnx"])
def test_every_public_name_is_listed_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert {"apply_policy", "autocast", "compare", "make_train_step"}.intersection(module.__all__)
    for public in module.__all__:
        assert inspect.getdoc(getattr(module, public)), public


def test_the_reference_shows_what_other_files_define() -> None:
    doc = pytest.importorskip("pdoc.doc", reason="make docs installs it")
    for module, names in ((jaxmp, {"TrainState", "autocast", "loss_scaling"}), (jaxmp.inspect, {"compare", "audit"})):
        shown = {member.name: member for member in doc.Module(module).members.values()}
        assert names <= shown.keys() and all(shown[name].docstring for name in names)
