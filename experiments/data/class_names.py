"""The names of the classes of images."""

_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES = {"mnist": tuple("0123456789"), "fashion_mnist": _FASHION, "cifar10": _CIFAR10}
"""The names of the classes of each data set of TFDS, in the order of the labels."""
