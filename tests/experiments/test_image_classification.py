"""Image classification with every model and API on a tiny CIFAR-10."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from recompiles import compiled_once
from run_tools import start

from experiments import image_classification
from experiments.models import nnx as nnx_models
from experiments.models.images import ResNet
from experiments.training import cli

CLASSES = [f"class {i}" for i in range(10)]


@pytest.fixture(scope="module")
def image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write folders of ten classes with four images each. Each class has a colour."""
    root = tmp_path_factory.mktemp("images")
    for split, (label, name), i in itertools.product(("train", "test"), enumerate(CLASSES), range(4)):
        folder = root / "cifar10" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(1000 * label + 10 * i + len(split))
        colour = np.array([25 * label % 190, 100 * label % 190, 60])
        pixels = colour + rng.integers(0, 60, (32, 32, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    """Allow dtype promotion in all threads.

    BatchNorm mixes dtypes, and `compare` compiles in several threads.
    """
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def tiny_networks(monkeypatch):
    def linen(classes, small_images):
        return ResNet((1,), "basic", classes, 4, small_images)

    def nnx(channels, classes, small_images, rngs):
        return nnx_models.ResNet((1,), channels, classes, 4, small_images, rngs=rngs)

    monkeypatch.setitem(image_classification.LINEN, "resnet18", linen)
    monkeypatch.setattr(nnx_models, "resnet18", nnx)


def config(image_dir: Path, **flags) -> image_classification.Config:
    recipe = {"dataset": "cifar10", "model": "resnet18", "image_size": 8, "batch_size": 10, "data_dir": image_dir}
    return image_classification.Config(**{**recipe, **flags})


@pytest.mark.parametrize(
    ("api", "policy"),
    [pytest.param("linen", "float32", marks=pytest.mark.slow("trains a network")), ("nnx", "mixed_bfloat16")],
)
def test_a_residual_network_learns_in_either_api_and_its_statistics_move(api, policy, image_dir):
    flags = {"optimizer": "sgd", "learning_rate": 0.05, "schedule": "cosine", "flip": True, "shift": 2, "steps": 12}
    experiment = image_classification.prepare(config(image_dir, api=api, policy=policy, **flags))
    state = experiment.init(0)
    before = jax.device_get(state.model_state)
    losses = []
    for batch in itertools.islice(experiment.train_batches(0), 12):
        state, metrics = experiment.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert batch["image"].shape == (10, 8, 8, 3) and batch["image"].dtype == policy.removeprefix("mixed_")
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    moved = jax.tree.map(lambda a, b: a.dtype == np.float32 and bool((a != b).any()), before, state.model_state)
    assert jax.tree.leaves(moved) and jax.tree.all(moved)
    assert compiled_once(experiment.step)


def test_digits_stay_between_0_and_1_and_other_sets_are_normalised(image_dir, data_dir):
    digits = image_classification.prepare(config(data_dir, dataset="digits", model="cnn", image_size=0))
    batch = next(digits.train_batches(0))["image"]
    assert float(batch.min()) == 0 and 0.9 < float(batch.max()) <= 1
    batch = next(
        image_classification.prepare(config(image_dir, model="cnn", image_size=0, batch_size=40)).train_batches(0)
    )
    np.testing.assert_allclose(batch["image"].mean((0, 1, 2)), 0, atol=1e-4)


MODULES = """
import sys, experiments.image_classification
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("experiments")]
print(*(file for file in files if not file.endswith("__init__.py")))
"""


@pytest.mark.slow("starts a process")
def test_a_reader_of_the_script_has_at_most_15_modules_and_2400_lines_to_read(tmp_path):
    files = start("-c", MODULES, cwd=tmp_path).stdout.split()
    assert 5 < len(files) <= 15 and sum(len(Path(file).read_text().splitlines()) for file in files) <= 2400


@pytest.mark.slow("trains a network")
def test_image_classification_trains_two_steps_in_nnx_on_a_folder_of_images(tmp_path, image_dir):
    flags = ["--dataset", "cifar10", "--api", "nnx", "--image-size", "12", "--flip", "--policy", "mixed_float16"]
    flags += ["--steps", "2", "--batch-size", "10", "--checkpoint-every", "0", "--data-dir", str(image_dir)]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        image_classification.train(
            cli.parse(image_classification.Config, "", [*flags, "--run-dir", str(tmp_path / "run")])
        )
    config, summary = (json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("config", "summary"))
    assert config["precision"]["data"] == summary["data"] == "cifar10: image files in the folder cifar10"
    assert summary["skipped"] == 0
