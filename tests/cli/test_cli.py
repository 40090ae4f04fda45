from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import types

import jax
import pytest
from places import ROOT

import jaxmp
from jaxmp import cli, hardware
from jaxmp.base.formats import formats
from jaxmp.cli import diagnosis, main

H200 = types.SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", compute_capability="9.0")


def run(*arguments, python="from jaxmp.cli import main; sys.exit(main(sys.argv[1:]))", **environment):
    """Run ``jaxmp`` in a new process; return its exit code, output and errors."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **environment}
    env = {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {python}", *arguments], env=env, capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def healthy(monkeypatch):
    """Remove everything that doctor could report about this machine."""
    for variable in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(diagnosis, "nvidia_driver", lambda: False)
    monkeypatch.setattr(diagnosis, "train_one_step", lambda policy: None)


def problems():
    return [finding.problem for finding in diagnosis.diagnose().findings]


# --- the command itself


def test_help_names_every_command_and_every_command_has_help(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert set(cli.COMMANDS) >= {"doctor", "formats"}
    for name in cli.COMMANDS:
        assert re.search(rf"^ +{name}\s+\w", overview, re.MULTILINE)
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.once
def test_an_unknown_command_or_option_exits_with_2_and_says_which(capsys):
    wrong = [(["doctr"], "invalid choice: 'doctr'"), (["formats", "--yaml"], "unrecognized arguments: --yaml")]
    wrong += [
        ([command, "mymod:f", "--loss-scale=abc"], "argument --loss-scale: invalid float value: 'abc'")
        for command in ("numerics", "first_nonfinite")
    ]
    for words, phrase in wrong:
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert phrase in capsys.readouterr().err


@pytest.mark.once
def test_help_and_version_do_not_wait_for_jax():
    loaded = "main({!r}); print('jax' in sys.modules or 'rich' in sys.modules)"
    assert run(python=f"from jaxmp.cli import main; {loaded.format([])}")[1].endswith("False\n")


# --- formats


@pytest.mark.once
def test_formats_prints_one_row_per_format_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["formats"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    title, *headers, _ = out.splitlines()[:4]
    assert title == "Floating-point formats" and "subnormal" in headers[1]
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[3:10]}
    assert list(rows) == [row.name for row in formats()]
    assert [row[0] for row in rows.values()] == ["64", "32", "19", "16", "16", "8", "8"]
    assert rows["float16"] == ["16", "5", "10", "65504", "6.10e-05", "5.96e-08", "9.77e-04", "yes"]
    assert [row[3] for row in rows.values()][3:] == ["3.39e+38", "65504", "57344", "448"]
    assert rows["float8_e4m3fn"][-1] == "no"
    assert max(map(len, out.splitlines()[:10])) <= 80


@pytest.mark.once
def test_formats_as_json_are_the_rows_in_full_precision(capsys):
    assert main(["formats", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["float16"]["smallest_subnormal"] == 2.0**-24
    assert rows["float32"]["largest"] == float(jax.numpy.finfo("float32").max)
    assert list(rows) == [row.name for row in formats()]


@pytest.mark.once
def test_python_m_jaxmp_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxmp", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("jaxmp.__main__", run_name="__main__")
    assert (stop.value.code, capsys.readouterr().out) == (0, f"jaxmp {jaxmp.__version__}\n")


@pytest.mark.once
def test_output_survives_a_pipe_that_closes(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        assert main(["formats"]) == 0
        assert os.fstat(closed.fileno()).st_rdev == os.stat(os.devnull).st_rdev  # Python's last flush goes there
    assert capsys.readouterr().err == ""


# --- doctor


def test_doctor_trains_here_and_says_everything(capsys, monkeypatch):
    for variable in ("JAX_PLATFORMS", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(diagnosis, "nvidia_driver", lambda: False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in (
        "cpu on platform cpu",
        "float32: a CPU computes half precision more slowly",
        "works: one step under mixed_bfloat16, with loss scaling, gave the right numbers",
        f"jax {jax.__version__}",
        f"jaxmp {jaxmp.__version__}",
        "nothing",
    ):
        assert text in out


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_the_step_that_doctor_trains_is_exact_and_one_with_wrong_numbers_is_told_apart(monkeypatch):
    for policy in ("float32", "bfloat16"):
        diagnosis.train_one_step(policy)
    monkeypatch.setattr(jax.numpy, "square", lambda x: x * x * 2)
    with pytest.raises(RuntimeError, match=r"should give a loss of 16 and weights of 0\.25, got 32\.0 and 0\.0"):
        diagnosis.train_one_step("mixed_bfloat16")


def test_doctor_exits_with_1_when_training_fails_and_says_how_to_see_more(healthy, monkeypatch, capsys):
    def fails(policy):
        raise RuntimeError(f"no kernel for {policy}\nand a long trace")

    monkeypatch.setattr(diagnosis, "train_one_step", fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Training            does not work\n" in out
    assert "one training step under mixed_bfloat16 fails: RuntimeError: no kernel for mixed_bfloat16\n" in out
    assert "jaxmp.cli.diagnosis.train_one_step('mixed_bfloat16')" in out and "long trace" not in out


def test_doctor_as_json_has_the_device_the_versions_and_what_to_fix(healthy, monkeypatch, capsys):
    monkeypatch.setattr(hardware.jax, "local_devices", lambda: [H200])
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"]["name"] == "NVIDIA H200" and report["hardware"]["compute_capability"] == "9.0"
    assert "float8_e4m3fn" in report["hardware"]["tensor_cores"]
    assert report["hardware"]["peak_tflops"]["bfloat16"] == 989.4
    assert report["hardware"]["recommended_policy"] == "mixed_bfloat16"
    assert (report["trains"], report["findings"]) == (True, [])
    assert {"python", "jaxmp", "jax", "jaxlib", "flax", "optax", "numpy"} <= set(report["versions"])


@pytest.mark.once
def test_doctor_reports_an_nvidia_gpu_that_jax_does_not_use(healthy, monkeypatch):
    monkeypatch.setattr(diagnosis, "nvidia_driver", lambda: True)
    (finding,) = diagnosis.diagnose().findings
    assert finding.problem == "an NVIDIA driver is installed, but JAX runs on the CPU"
    assert finding.remedy.startswith('pip install "jax[cuda13]"') and "JAX_PLATFORMS=cuda python -c" in finding.remedy

    monkeypatch.setattr(hardware.jax, "local_devices", lambda: [H200])
    assert diagnosis.diagnose().findings == ()


@pytest.mark.once
def test_doctor_tells_of_settings_that_change_what_a_policy_means(healthy, monkeypatch):
    with jax.enable_x64(True):
        assert problems() == [
            "jax_enable_x64 is True: new arrays are float64, which the fast units for half precision do not multiply"
        ]
    with jax.default_matmul_precision("highest"):
        assert problems()[0].startswith(
            "jax_default_matmul_precision is highest: it sets the precision of every product whose policy"
        )
    with jax.debug_nans(True):
        assert problems() == [
            "jax_debug_nans is True: a step that overflows raises an error, and loss scaling cannot skip it"
        ]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(diagnosis, "nvidia_driver", lambda: True)
    assert problems() == ["JAX_PLATFORMS=cpu is set: JAX uses no other kind of device"]


@pytest.mark.once
def test_doctor_says_that_jax_does_not_start_and_why(healthy, monkeypatch, capsys):
    def fails():
        raise RuntimeError("Unable to initialize backend 'nonsense'")

    monkeypatch.setattr(jax, "local_device_count", fails)
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "none: JAX does not start" in out and "JAX_PLATFORMS=nonsense is set" in out
    assert "JAX does not start: RuntimeError: Unable to initialize backend 'nonsense'" in out


@pytest.mark.once
@pytest.mark.slow("processes of their own")
@pytest.mark.parametrize(
    ("missing", "text"), [("jaxlib", "JAX does not start: ModuleNotFoundError"), ("flax", "No module")]
)
def test_doctor_exits_with_1_when_a_package_is_missing(missing, text):
    hidden = f"sys.modules[{missing!r}] = None; from jaxmp.cli import main; sys.exit(main(['doctor']))"
    code, out, err = run(python=hidden)
    assert (code, "Traceback" in err) == (1, False)
    assert text in out


def test_the_package_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jaxmp": "jaxmp.cli:main"}
