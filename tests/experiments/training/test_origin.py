"""The environment that a result records."""

from experiments.training.origin import environment


def test_the_command_says_whether_float8_is_emulated(monkeypatch):
    monkeypatch.delenv("JAXMP_FLOAT8", raising=False)
    plain = environment()["command"]
    monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
    assert environment()["command"] == f"JAXMP_FLOAT8=emulate {plain}"
