"""Encode text by GPT-2's byte pairs, from its published files.

Radford et al. 2019; Sennrich et al. 2016, arXiv 1508.07909.

A text is split into words, and a word into bytes. In a word, the neighbouring pair that comes first in the list of
merges becomes one token. This repeats until no pair is in the list. Each different word is encoded once, so megabytes
of text take seconds.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

import numpy as np

from experiments.data.errors import DataError

FILES = (
    ("encoder.json", "vocab.bpe"),
    ("vocab.json", "merges.txt"),
)  # OpenAI's names, and those of the Hugging Face Hub
FOLDERS = ("", "gpt2_bpe", "gpt2")  # below the data folder
END = "<|endoftext|>"
_GONE = -1  # marks a part that was merged into the part before it


class BPE:
    """GPT-2's tokenizer. Bytes that are not valid UTF-8 are kept.

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
        letters = _letters()
        try:
            raw = vocabulary.read_bytes(), merges.read_bytes()
            numbers: dict[str, int] = json.loads(raw[0])
            if any(type(number) is not int for number in numbers.values()) or sorted(numbers.values()) != [
                *range(len(numbers))
            ]:
                raise ValueError("the tokens' numbers are not 0, 1, 2, …")
            lines = [line.split() for line in raw[1].decode().splitlines() if not line.startswith("#version")]
            self._byte = [numbers[letters[byte]] for byte in range(256)]
            self._merges = {
                (numbers[left], numbers[right]): (rank, numbers[left], numbers[right], numbers[left + right])
                for rank, (left, right) in enumerate(line for line in lines if line)
            }
            words = {*self._byte, *(merged for *_, merged in self._merges.values())}
            others = {token: number for token, number in numbers.items() if number not in words}
            if stray := [token for token in others if not re.fullmatch(r"<[^<>]*>", token)]:
                raise ValueError(f"no merge makes {len(stray)} of the tokens, for example {stray[0]!r}")
        except OSError as error:
            raise DataError(f"the byte-pair encoding cannot be read: {error}") from error
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(
                f"{vocabulary} and {merges} are not the two files of one byte-pair encoding ({type(error).__name__}: "
                f"{error}); replace them with GPT-2's complete files, or use --tokens bytes"
            ) from error
        self.name = f"byte pairs of {vocabulary.name}"
        self.size, self.end = max(numbers.values()) + 1, numbers.get(END)
        self.fingerprint = hashlib.sha256(b"".join(raw)).hexdigest()
        bytes_of = {letter: byte for byte, letter in letters.items()}
        self._bytes = {
            number: token.encode() if token in others else bytes(bytes_of[letter] for letter in token)
            for token, number in numbers.items()
        }
        self._tokens_of = functools.lru_cache(2**18)(self._encode_word)

    def encode(self, document: bytes) -> np.ndarray:
        """Return the tokens of a document, int32 (n,).

        If the document contains the letters of the token ``end``, they are encoded as ordinary text.
        """
        words = words_of(document.decode(errors="surrogateescape"))
        return np.fromiter(chain.from_iterable(map(self._tokens_of, words)), np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(self._bytes.get(int(token), b"") for token in tokens).decode(errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        parts = [self._byte[byte] for byte in word.encode(errors="surrogateescape")]
        before, after = (
            [*range(-1, len(parts) - 1)],
            [*range(1, len(parts) + 1)],
        )  # the neighbours of each remaining part

        def merge_at(i: int) -> Iterator[tuple[int, int, int, int, int]]:
            """Yield the merge of part ``i`` and its right neighbour, if there is one."""
            if i >= 0 and after[i] < len(parts) and (merge := self._merges.get((parts[i], parts[after[i]]))):
                rank, left, right, merged = merge
                yield rank, i, left, right, merged

        heap = [merge for i in range(len(parts)) for merge in merge_at(i)]
        heapq.heapify(heap)
        while heap:
            _, i, left, right, merged = heapq.heappop(heap)
            gone = after[i]
            if parts[i] != left or gone == len(parts) or parts[gone] != right:
                continue  # one of the two parts has been merged since
            parts[i], parts[gone], after[i] = merged, _GONE, after[gone]
            if after[i] < len(parts):
                before[after[i]] = i
            for merge in chain(merge_at(before[i]), merge_at(i)):
                heapq.heappush(heap, merge)
        return [part for part in parts if part != _GONE]


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


def words_of(text: str) -> Sequence[str]:
    """Split a text into the words that are encoded one by one.

    A word is a run of letters, a run of digits, or a run of other characters, together with a space before it. Other
    runs of white space are words too. English contractions such as ``'ll`` are separate words.
    """
    return (_ascii() if text.isascii() else _unicode()).findall(text)


@functools.cache
def _ascii() -> re.Pattern[str]:
    return _pattern("A-Za-z", "0-9", r"\t-\r ")


@functools.cache
def _unicode() -> re.Pattern[str]:
    kinds = ((code, unicodedata.category(chr(code))[0]) for code in range(sys.maxunicode + 1))
    ranges: dict[str, list[str]] = {"L": [], "N": []}
    for kind, run in groupby(kinds, key=lambda item: item[1]):
        if kind in ranges:
            codes = [code for code, _ in run]
            ranges[kind].append(rf"\U{codes[0]:08x}-\U{codes[-1]:08x}")
    # White space as Unicode defines it. Python's \s also matches U+001C to U+001F.
    spaces = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    return _pattern("".join(ranges["L"]), "".join(ranges["N"]), spaces)


def _pattern(letters: str, digits: str, spaces: str) -> re.Pattern[str]:
    """Return GPT-2's pattern for words.

    ``re`` has no classes for letters and digits, so they are spelled out.
    """
    words = rf" ?[{letters}]+| ?[{digits}]+| ?[^{spaces}{letters}{digits}]+"
    return re.compile(rf"'(?:[stmd]|re|ve|ll)|{words}|[{spaces}]+(?![^{spaces}])|[{spaces}]+")


def _letters() -> dict[int, str]:
    """Return the letter with which the files write each byte.

    A printable byte is its own letter. The other bytes have letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
