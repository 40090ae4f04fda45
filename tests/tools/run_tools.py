"""Run a script of the experiments in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from places import ROOT


def start(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "dumb"}
    # Remove the flag for four devices, because users have one CPU device. The other flags make compilation quick.
    flags = os.environ["XLA_FLAGS"].split()
    env["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def train(module: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = start("-m", f"experiments.{module}", *flags, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done
