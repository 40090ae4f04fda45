"""Run a script of the experiments, in a subprocess or in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from experiments.training import cli


def start(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "dumb"}
    # Remove the flag for four devices, because users have one CPU device. The other flags make compilation quick.
    flags = os.environ["XLA_FLAGS"].split()
    env["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def run_main(monkeypatch: pytest.MonkeyPatch, config_type: type, script: Callable[[Any], Any], *flags: str) -> None:
    """Call ``cli.main`` as a process with these flags in its command line does."""
    monkeypatch.setattr(sys, "argv", [sys.argv[0], *flags])
    monkeypatch.setenv("TERM", "dumb")
    # cli.main sets these; monkeypatch restores them.
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)  # It would change the allocator of all later tests.
    cli.main(config_type, script, "")
