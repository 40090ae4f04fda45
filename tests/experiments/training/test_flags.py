"""The flags of the experiments: their meaning, --help, and errors of one line."""

from __future__ import annotations

import dataclasses
import re

import pytest

import jaxmp
from experiments import compare, data, image_classification, language_modeling, masked_lm
from experiments.benchmarks import loss_scaling
from experiments.training import cli
from experiments.training.precision import read_loss_scale, read_policy

SCRIPTS = [image_classification, language_modeling, masked_lm, compare, loss_scaling]


def test_a_policy_or_an_opt_level_brings_its_loss_scale():
    for policy, loss_scale, opt_level, expected, scale in [
        ("mixed_float16", "auto", None, "mixed_float16", jaxmp.DynamicLossScale),
        ("float16", "auto", None, "float16", jaxmp.DynamicLossScale),
        ("mixed_float16", "none", None, "mixed_float16", jaxmp.NoOpLossScale),
        ("auto", "auto", "O0", "float32", jaxmp.NoOpLossScale),
        ("auto", "auto", "O1", "mixed_float16", jaxmp.DynamicLossScale),
        ("auto", "auto", "O2", "O2", jaxmp.DynamicLossScale),
        ("auto", "auto", "O3", "float16", jaxmp.NoOpLossScale),
        ("auto", "headroom", "O3", "float16", jaxmp.HeadroomLossScale),
    ]:
        chosen, chosen_scale, text = read_policy(policy, loss_scale, opt_level)
        assert chosen == jaxmp.get_policy(expected)
        assert type(chosen_scale) is scale
        assert type(read_loss_scale(text)) is scale


def test_a_loss_scale_is_read_with_its_parameters_or_an_error():
    for text, expected in [
        ("none", jaxmp.NoOpLossScale()),
        ("static:4096", jaxmp.StaticLossScale(4096)),
        ("dynamic", jaxmp.DynamicLossScale()),
        ("dynamic:1024", jaxmp.DynamicLossScale(1024)),
        ("dynamic:1024,period=10,backoff=0.25", jaxmp.DynamicLossScale(1024, period=10, backoff=0.25)),
        ("dynamic:hysteresis=2", jaxmp.DynamicLossScale(hysteresis=2)),
        ("headroom:3,max_loss_scale=65536", jaxmp.HeadroomLossScale(3, max_loss_scale=65536)),
    ]:
        assert str(read_loss_scale(text)) == str(expected)

    for text, message in [
        ("dynamc", "unknown loss scale 'dynamc'; known, nearest first: 'dynamic', .*; write static:4096, for example"),
        ("static", "a static loss scale needs its value, got 'static'; write static:4096"),
        ("none:2", "the loss scale 'none' has no parameter '2'; its parameters: none at all"),
        ("dynamic:perod=10", "the loss scale 'dynamic' has no parameter 'perod=10'; its parameters: 'period', "),
        ("dynamic:1024,10", "the loss scale 'dynamic' has no parameter '10'"),
        ("dynamic:period=ten", "a loss scale's parameters are numbers, got 'period=ten' in 'dynamic:period=ten'"),
        ("dynamic:period=0", "period must be a whole number.*, got 0"),
        ("static:nan", "loss_scale must be .*, got nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_loss_scale(text)


def test_help_has_every_flag_with_a_text_and_a_default(capsys, monkeypatch):
    for script in SCRIPTS:
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as end:
            cli.parse(script.Config, script.__doc__, ["--help"])
        assert end.value.code == 0
        shown = capsys.readouterr().out
        for field in dataclasses.fields(script.Config):
            flag = "--" + field.name.replace("_", "-")
            entry = re.search(rf"^[│ ] (?:--\S+ \S+, )*{flag}\b(.*?)(?=^[│ ] --|\Z)", shown, re.DOTALL | re.MULTILINE)
            assert entry, f"{flag} is missing"
            words = entry[1].replace("│", " ").split()
            assert len(words) > 3, f"{flag} has no text"
            assert "(default:" in words or "(repeatable)" in words, f"{flag} has no default"
        assert script.__doc__.splitlines()[0] in shown


def test_an_invalid_flag_is_an_error_before_anything_is_read(monkeypatch):
    for script, flags, message in [
        (image_classification, {"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        (image_classification, {"accumulate": 3}, "--accumulate must divide --batch-size, got 3 for batches of 64"),
        (image_classification, {"ema": 1.0}, "--ema must be at least 0 and below 1, got 1"),
        (image_classification, {"learning_rate": -1.0}, "--learning-rate must be positive and finite, got -1"),
        (image_classification, {"seed": -1}, "--seed must be at least 0"),
        (image_classification, {"epochs": 0}, "--epochs must be at least 1, got 0"),
        (language_modeling, {"steps": 0}, "--steps must be at least 1, got 0"),
        (language_modeling, {"opt_level": "O1", "policy": "mixed_float16"}, "got --opt-level O1 and --policy mixed_"),
        (language_modeling, {"evaluate_every": -1}, "--evaluate-every must be at least 0, got -1"),
        (image_classification, {"keep": 0}, "--keep must be at least 1, got 0"),
        (language_modeling, {"layers": 2}, "--model next_token has no --layers, got 2; --model gpt2 has"),
        (language_modeling, {"tokens": "bytes"}, "got --tokens bytes and --schedule constant; take --model gpt2"),
        (language_modeling, {"model": "gpt2", "heads": 3}, "--width must be a multiple of --heads, got 128 for 3"),
        (language_modeling, {"model": "gpt2", "clip": 0.0}, "--clip must be positive, got 0"),
        (language_modeling, {"top_k": -1}, "--top-k must be at least 0, got -1"),
        (masked_lm, {"width": 0}, "--width must be at least 1, got 0"),
        (compare, {"policies": ("mixed_float61",)}, "unknown policy 'mixed_float61'"),
        (compare, {"loss_scales": ("dynamc",)}, "unknown loss scale 'dynamc'"),
        (compare, {"policies": ("float16@statc:2",)}, "unknown loss scale 'statc:2'"),
    ]:

        def no_data(*_):
            raise AssertionError("the data were read before the flags were checked")

        monkeypatch.setattr(data.source, "read", no_data)
        monkeypatch.setattr(data.images, "read", no_data)
        with pytest.raises(ValueError, match=message):
            script.prepare(script.Config(**flags))


def test_user_errors_are_one_line_and_exit_code_2_and_failed_training_is_exit_code_1(capsys, monkeypatch):
    with pytest.raises(SystemExit) as end, cli.bad_values_end_it():
        raise ValueError("a rule,\nand what came")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: a rule, and what came\n"

    def diverge(_):
        raise jaxmp.NonFiniteTrainingError("gradients of 'w'")

    monkeypatch.setattr(cli, "parse", lambda *_: None)
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(cli, "plain_warnings", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main(object, diverge, "")
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: gradients of 'w'\n"
