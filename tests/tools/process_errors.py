"""A script whose two processes get everything wrong, one after the other, and tell what they were told."""

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
    processes._LEAVE_S = 100.0  # on a busy machine the other one may come to its end late
    base = cli.parse(language_modeling.Config, "", flags(config.folder))
    own = config.process_id
    assert own is not None
    # The same path, and another folder for each process.
    mine = config.bad / str(own)
    mine.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(mine, os.O_RDONLY), 100)

    def missing() -> None:
        if own == 1:
            raise FileNotFoundError("no such text")

    def prepared(**changes: object) -> object:
        flags = dataclasses.replace(base, **changes)
        return lambda: processes.together(lambda: language_modeling.prepare(flags), first_before=True)  # as the loop

    attempts = {
        "mesh": prepared(mesh="data=3"),
        "axis": prepared(mesh="row=4"),
        "batch": prepared(batch_size=6),
        "weights": prepared(save_weights=config.bad / ("0" if own == 0 else "gone") / "x.safetensors"),
        "flags": lambda: processes.require_alike({"batch_size": 8 * (own + 1)}),
        "data": lambda: processes.together(missing),
        "folder": lambda: processes.folder_of_first(lambda: Path("/proc/self/fd/100")),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    print("found", json.dumps(found), file=sys.stderr)
    with cli.bad_values_end_it():
        raise ValueError("the same on both")
