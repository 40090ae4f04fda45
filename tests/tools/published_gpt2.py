"""Random weights of a small GPT-2, in the files and the layout in which GPT-2 is published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, CONTEXT, WIDTH, LAYERS = 96, 32, 128, 2


def write(folder: Path) -> dict[str, np.ndarray]:
    """Write ``config.json`` and ``model.safetensors``, and return the tensors by name."""
    draws = np.random.default_rng(0)
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (CONTEXT, WIDTH), **_norm("ln_f")}
    for n in range(LAYERS):
        shapes |= _norm(f"h.{n}.ln_1") | _norm(f"h.{n}.ln_2")
        shapes |= _dense(f"h.{n}.attn.c_attn", WIDTH, 3 * WIDTH) | _dense(f"h.{n}.attn.c_proj", WIDTH, WIDTH)
        shapes |= _dense(f"h.{n}.mlp.c_fc", WIDTH, 4 * WIDTH) | _dense(f"h.{n}.mlp.c_proj", 4 * WIDTH, WIDTH)
    tensors = {name: draws.normal(size=shape, scale=0.05).astype(np.float32) for name, shape in shapes.items()}
    for name in tensors:
        if ".ln_" in f".{name}" and name.endswith("weight"):
            tensors[name] += 1
    masks = {f"h.{n}.attn.bias": np.tril(np.ones((1, 1, CONTEXT, CONTEXT), np.float32)) for n in range(LAYERS)}
    config = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | masks, folder / "model.safetensors")
    return tensors


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def _dense(name: str, width: int, features: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width, features), f"{name}.bias": (features,)}
