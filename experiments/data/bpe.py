"""Encode text by GPT-2's byte pairs, from its published files.

Radford et al. 2019; Sennrich et al. 2016, arXiv 1508.07909. The package tokenizers does the work.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.data.errors import DataError

FILES = (
    ("encoder.json", "vocab.bpe"),
    ("vocab.json", "merges.txt"),
)  # OpenAI's names, and those of the Hugging Face Hub
FOLDERS = ("", "gpt2_bpe", "gpt2")  # below the data folder
END = "<|endoftext|>"
_INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are not valid UTF-8, as "surrogateescape" decodes them


class BPE:
    """GPT-2's tokenizer. Bytes that are not valid UTF-8 are kept: each becomes a token.

    Args:
      vocabulary: the JSON file with the number of each token. A token is written with a letter for each byte.
      merges: the text file of merges, with two tokens per line. Earlier lines are merged first.

    Raises:
      DataError: a file is damaged, or the files do not belong together.

    Attributes:
      name: the name of the tokenizer.
      size: the number of tokens.
      end: the number of the token between documents; None if there is no such token.
      fingerprint: a hash of the files.
    """

    def __init__(self, vocabulary: Path, merges: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        try:
            raw = vocabulary.read_bytes(), merges.read_bytes()
            numbers: dict[str, int] = json.loads(raw[0])
            pairs = _read_merges(raw[1].decode())
            _require_complete(numbers, pairs)
        except OSError as error:
            raise DataError(f"the byte-pair encoding cannot be read: {error}") from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(
                f"{vocabulary} and {merges} are not the two files of one byte-pair encoding ({type(error).__name__}: "
                f"{error}); replace them with GPT-2's complete files, or use --tokens bytes"
            ) from error
        self.name = f"byte pairs of {vocabulary.name}"
        self.size, self.end = len(numbers), numbers.get(END)
        self.fingerprint = hashlib.sha256(b"".join(raw)).hexdigest()
        self._tokenizer = Tokenizer(models.BPE(numbers, pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._byte = {byte: numbers[letter] for byte, letter in _letters().items()}

    def encode(self, document: bytes) -> np.ndarray:
        """Return the tokens of a document, int32 (n,).

        If the document contains the letters of the token ``end``, they are encoded as ordinary text.
        """
        tokens = list[int]()
        for run in _INVALID.split(document.decode(errors="surrogateescape")):
            if _INVALID.fullmatch(run):
                tokens += [self._byte[byte] for byte in run.encode(errors="surrogateescape")]
            else:
                tokens += self._tokenizer.encode(run).ids
        return np.asarray(tokens, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that are not valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(token) for token in tokens])


def _read_merges(text: str) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, the first merge first."""
    lines = [line.split() for line in text.splitlines() if not line.startswith("#version")]
    return [(left, right) for left, right in filter(None, lines)]


def _require_complete(numbers: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Raise a ValueError or a KeyError if a vocabulary and merges do not belong together.

    Every token must be a byte, the result of a merge, or a name in angle brackets.
    """
    is_number = [type(number) is int for number in numbers.values()]
    if not all(is_number) or sorted(numbers.values()) != [*range(len(numbers))]:
        raise ValueError("the tokens' numbers are not 0, 1, 2, …")
    words = {numbers[token] for token in (*_letters().values(), *(left + right for left, right in merges))}
    others = [token for token, number in numbers.items() if number not in words]
    if stray := [token for token in others if not re.fullmatch(r"<[^<>]*>", token)]:
        raise ValueError(f"no merge makes {len(stray)} of the tokens, for example {stray[0]!r}")


def _letters() -> dict[int, str]:
    """Return the letter with which the files write each byte.

    A printable byte is its own letter. The other bytes have the letters from U+0100 on, in order.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in alphabet if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in own]
    return own | dict(zip(others, alphabet[len(own) :], strict=True))


def find(folder: Path) -> tuple[Path, Path] | None:
    """Return the two files in a data folder.

    The files may also be in its folders ``gpt2_bpe`` or ``gpt2``. The result is None if there are no such files.

    Raises:
      DataError: only one of the two files exists.
    """
    for place in (folder / name for name in FOLDERS):
        for names in FILES:
            there = [place / name for name in names if (place / name).is_file()]
            if len(there) == 1:
                (absent,) = (name for name in names if name != there[0].name)
                raise DataError(
                    f"GPT-2's byte pairs are two files, but {place} has {there[0].name} and no {absent}; put {absent} "
                    "there too, or take --tokens bytes"
                )
            if there:
                return there[0], there[1]
    return None


def absent(folder: Path) -> DataError:
    """Return the error for missing files."""
    both = " (or ".join(" and ".join(names) for names in FILES)
    return DataError(
        f"--tokens bpe needs GPT-2's {both}), but neither {folder} nor {folder / FOLDERS[1]} has them; put them there, "
        "name the folder that has them with --data-dir, or take --tokens bytes"
    )
