"""Make each mistake in two processes, and print the error messages."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import tyro
from process_tools import flags

from experiments import language_modeling
from experiments.training import cli, processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cli.Training):
    folder: tyro.conf.Positional[Path]
    bad: tyro.conf.Positional[Path]


def train(config: Config) -> None:
    processes._LEAVE_S = 100.0  # on a busy machine, the other process may end late
    base = cli.parse(language_modeling.Config, "", flags(config.folder))
    process_id = config.process_id
    assert process_id is not None
    # /proc/self/fd/100 is the same path in both processes, but another folder in each.
    process_folder = config.bad / str(process_id)
    process_folder.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(process_folder, os.O_RDONLY), 100)

    def missing() -> None:
        if process_id == 1:
            raise FileNotFoundError("no such text")

    def prepared(**changes: object) -> object:
        flags = dataclasses.replace(base, **changes)
        # The training loop prepares an experiment in the same way.
        return lambda: processes.together(lambda: language_modeling.prepare(flags), first_before=True)

    attempts = {
        "mesh": prepared(mesh="data=3"),
        "axis": prepared(mesh="row=4"),
        "batch": prepared(batch_size=6),
        "weights": prepared(save_weights=config.bad / ("0" if process_id == 0 else "gone") / "x.safetensors"),
        "flags": lambda: processes.require_alike({"batch_size": 8 * (process_id + 1)}),
        "data": lambda: processes.together(missing),
        "folder": lambda: processes.folder_of_first(lambda: Path("/proc/self/fd/100")),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            messages[name] = str(error)
    print("found", json.dumps(messages), file=sys.stderr)
    with cli.bad_values_end_it():
        raise ValueError("the same on both")
