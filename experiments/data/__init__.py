"""Data sets, tokens, and batches on the device."""

from experiments.data.source import IMAGES as IMAGES
from experiments.data.source import DataError as DataError
from experiments.data.source import read as read
