"""Build `digits`, 1,797 handwritten digits from scikit-learn, for TFDS.

The images have 8×8 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds


class Digits(tfds.core.GeneratorBasedBuilder):
    """Images of 8×8 pixels with 17 levels from 0 to 255, and labels 0 to 9.

    Every fifth image of each class is in the test split.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Optical recognition of handwritten digits (Alpaydin and Kaynak 1998), scikit-learn's copy.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,  # keep the order of scikit-learn
        )

    def _split_generators(self, _: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # scikit-learn counts from 0 to 16
        counts = np.zeros(10, int)
        for i, label in enumerate(digits.target):
            counts[label] += 1
            if (counts[label] % 5 == 0) == test:
                yield i, {"image": Image.fromarray(pixels[i]), "label": int(label)}
