"""Text as tokens: documents, tokenizers, the cache on disk, and BERT's masking."""

from __future__ import annotations

import collections
import itertools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import data
from experiments.data import bpe, corpus, text, tokens
from experiments.data.masking import IGNORE, mask
from experiments.training import mesh

PAIRS = [b"abababcdc", b"", b"x", b"ababefef"]  # an odd last byte belongs to no pair
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
LETTERS = {byte: chr(byte) for byte in PRINTABLE}
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - PRINTABLE))}
MERGES = [b" t", b"he", b" the", b"in", b"\n\n", b"re", b" re", b"\xc3\xa9", b"aa", b"ing"]
SPLITS = [(b" ", b"t"), (b"h", b"e"), (b" t", b"he"), (b"i", b"n"), (b"\n", b"\n"), (b"r", b"e"), (b" ", b"re"),
          (b"\xc3", b"\xa9"), (b"a", b"a"), (b"in", b"g")]  # fmt: skip


def written(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)


def put_bpe(folder, names=bpe.FILES[0]):
    """Write a byte-pair encoding of ten merges in GPT-2's format.

    The numbers of its tokens are not in the order of the bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = [bytes([byte]) for byte in reversed(range(256))] + MERGES
    numbers = {written(token): number for number, token in enumerate(known)} | {bpe.END: len(known)}
    (folder / names[0]).write_text(json.dumps(numbers))
    lines = [" ".join(map(written, pair)) for pair in SPLITS]
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    return bpe.BPE(folder / names[0], folder / names[1]), {token: number for number, token in enumerate(known)}


@pytest.fixture
def encoding(tmp_path):
    return put_bpe(tmp_path / "data" / "gpt2_bpe")


@pytest.fixture(autouse=True)
def nothing_remembered():
    tokens.load.cache_clear()


# --- documents ------------------------------------------------------------------------------------------------------


def test_the_last_tenth_of_a_file_is_held_out_and_a_missing_file_is_an_error(tmp_path):
    (tmp_path / "a.log").write_bytes(bytes(range(100)))
    documents = corpus.read(str(tmp_path / "a.log"), None)
    assert documents.train == [bytes(range(90))] and documents.test == [bytes(range(90, 100))]
    assert documents.origin.startswith("a.log: 1 file, 100 bytes, sha256 ")

    with pytest.raises(data.DataError, match=r"--dataset is pysource, or the path of a text file .* there is no .*/a"):
        corpus.read(str(tmp_path / "a"), None)
    with pytest.raises(data.DataError, match="but there is no ''"):  # not the current folder
        corpus.read("", None)
    with pytest.raises(data.DataError, match=r"--dataset needs text, but .* has none; a folder's [.]txt"):
        corpus.read(str(tmp_path), None)


def test_every_tenth_file_of_a_folder_is_held_out_or_the_end_of_each_of_few_files(tmp_path):
    for i in range(21):
        (tmp_path / "books" / f"{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / f"{i % 3}" / f"{i:02}.txt").write_text(f"document {i}")
    (tmp_path / "books" / "0" / "00.bin").write_text("no text")
    (tmp_path / "books" / "0" / "empty.txt").write_text("")
    names = sorted((i % 3, i) for i in range(21))
    documents = corpus.read(str(tmp_path / "books"), None)
    assert documents.test == [f"document {i}".encode() for _, i in names[9::10]]
    assert len(documents.train) == 19 and not {*documents.test} & {*documents.train}
    assert corpus.digest(documents.train) != corpus.digest([b"".join(documents.train)])
    (tmp_path / "few").mkdir()
    for name in ("a.py", "b.md"):
        (tmp_path / "few" / name).write_text(name * 10)
    documents = corpus.read(str(tmp_path / "few"), None)
    assert documents.train == [b"a.py" * 9, b"b.md" * 9] and documents.test == [b"a.py", b"b.md"]


# --- tokenizers -----------------------------------------------------------------------------------------------------


def test_pairs_are_ranks_of_byte_pairs_and_rare_pairs_share_the_last():
    pairs = [document[i : i + 2] for document in PAIRS for i in range(0, len(document) - 1, 2)]
    counts = collections.Counter(pairs)
    ranked = sorted(counts, key=lambda pair: (-counts[pair], pair))
    vocabulary = {pair: rank for rank, pair in enumerate(ranked[:2])}
    tokenizer = tokens.Pairs(PAIRS, vocabulary=3)
    encoded = [token for document in PAIRS for token in tokenizer.encode(document).tolist()]
    assert encoded == [vocabulary.get(pair, 2) for pair in pairs] == [0, 0, 0, 2, 0, 0, 1, 1]
    assert tokenizer.encode(b"cdefzz").tolist() == [2, 1, 2]
    for vocabulary in (1, 2**16 + 1):
        with pytest.raises(data.DataError, match=f"2 to 65536 tokens, got --vocabulary {vocabulary}"):
            tokens.Pairs(PAIRS, vocabulary)


# The result of GPT-2's pattern with the package `regex`.
WORDS = [
    ("Don't we'll say 'Tis 42nd?!", ["Don", "'t", " we", "'ll", " say", " '", "Tis", " 42", "nd", "?!"]),
    ("a  b   \n\n c\t", ["a", " ", " b", "   \n\n", " c", "\t"]),
    ("x_1 = y\xb2+\u2167\xbd and \u4e09", ["x", "_", "1", " =", " y", "\xb2", "+", "\u2167\xbd", " and", " \u4e09"]),
    ("na\xefve e\u0301 \u02bcn\xa0 \u3000\u597d \u200bz",
     ["na\xefve", " e", "\u0301", " \u02bcn", "\xa0 ", "\u3000", "\u597d", " \u200b", "z"]),
    ("\x1cA\x85 B\u2028C", ["\x1c", "A", "\x85", " B", "\u2028", "C"]),
    ("\U0001f469\u200d\U0001f469 ok\u2026", ["\U0001f469\u200d\U0001f469", " ok", "\u2026"]),
    ("'S 're're'x  'll", ["'", "S", " '", "re", "'re", "'", "x", " ", " '", "ll"]),
]  # fmt: skip


def test_text_is_cut_into_words_as_gpt2_does(encoding):
    ours, _ = encoding
    for line, words in WORDS:
        cut = ours._tokenizer.pre_tokenizer.pre_tokenize_str(line)
        assert [line[start:end] for _, (start, end) in cut] == words


def merged(word: bytes) -> list[bytes]:
    """Merge one pair at a time: the first in the list, at its leftmost position."""
    parts = [bytes([byte]) for byte in word]
    while candidates := [pair for pair in SPLITS if pair in set(itertools.pairwise(parts))]:
        i = list(itertools.pairwise(parts)).index(candidates[0])
        parts[i : i + 2] = [candidates[0][0] + candidates[0][1]]
    return parts


def test_a_text_is_merged_word_by_word_and_comes_back(encoding):
    for words in [
        ["the", " rethering", " in", " there", "\n\n", "\n", "the", " end"],
        ["aaaaa", " aaaa"],
        ["café", " é", " ée"],
        [],
        ["🎈", " the", " end"],
        *(words for _, words in WORDS),
    ]:
        ours, numbers = encoding
        document = "".join(words)
        expected = [numbers[part] for word in words for part in merged(word.encode())]
        assert ours.encode(document.encode()).tolist() == expected
        assert ours.decode(expected) == document

    ours, numbers = encoding
    assert ours.encode(b"the \xff\xc3").tolist() == [numbers[part] for part in (b"t", b"he", b" ", b"\xff", b"\xc3")]
    assert ours.decode(ours.encode(b"\xff")) == "\ufffd"
    assert (ours.size, ours.end) == (267, 266) and ours.decode([266]) == bpe.END


def test_gpt2s_files_are_found_by_either_name(tmp_path):
    for place, names in (("", bpe.FILES[0]), ("gpt2_bpe", bpe.FILES[1]), ("gpt2", bpe.FILES[0])):
        root = tmp_path / f"root-{place}"
        assert bpe.find(root) is None
        put_bpe(root / place, names)
        assert bpe.find(root) == (root / place / names[0], root / place / names[1])


def test_files_of_gpt2_that_are_missing_or_damaged_are_errors_that_name_them(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    with pytest.raises(data.DataError, match=re.escape(
        "--tokens bpe needs GPT-2's encoder.json and vocab.bpe (or vocab.json and merges.txt), but neither "
        f"{tmp_path} nor {tmp_path}/gpt2_bpe has them; put them there")):  # fmt: skip
        tokens.load(str(tmp_path / "a.txt"), tmp_path, "bpe", 0)
    put_bpe(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "vocab.bpe").unlink()
    with pytest.raises(data.DataError, match=r"gpt2 has encoder.json and no vocab.bpe; put vocab.bpe there too"):
        tokens.load(str(tmp_path / "a.txt"), tmp_path, "auto", 0)
    (tmp_path / "gpt2" / "vocab.bpe").write_text("h e\nq u\n")
    with pytest.raises(data.DataError, match=r"not the two files of one byte-pair encoding \(KeyError: 'qu'\)"):
        tokens.load(str(tmp_path / "a.txt"), tmp_path, "auto", 0)


def test_a_vocabulary_that_the_merges_do_not_make_is_refused_unless_in_angle_brackets(tmp_path):
    for change, message in [
        ({"中": 267}, "no merge makes 1 of the tokens, for example '中'"),
        ({"ab": 267}, "no merge makes 1 of the tokens, for example 'ab'"),
        ({"<|sep|>": "267"}, "numbers are not 0, 1, 2"),
        ({"<|sep|>": 267.5}, "numbers are not 0, 1, 2"),
        ({"<|sep|>": 266}, "numbers are not 0, 1, 2"),
    ]:
        put_bpe(tmp_path)
        vocabulary, merges = (tmp_path / name for name in bpe.FILES[0])
        vocabulary.write_text(json.dumps(json.loads(vocabulary.read_text()) | change))
        with pytest.raises(data.DataError, match=f"not the two files of one byte-pair encoding .*{message}"):
            bpe.BPE(vocabulary, merges)
    put_bpe(tmp_path)
    vocabulary.write_text(json.dumps(json.loads(vocabulary.read_text()) | {"<|中 1|>": 267}))
    encoding = bpe.BPE(vocabulary, merges)
    assert encoding.size == 268 and encoding.decode([267]) == "<|中 1|>"


def test_a_long_word_is_merged(encoding):
    ours, numbers = encoding
    assert ours.encode(b"heingaa" * 3000).tolist() == 3000 * [numbers[part] for part in (b"he", b"ing", b"aa")]


# --- the text on the device -----------------------------------------------------------------------------------------


@pytest.fixture
def books(tmp_path):
    (tmp_path / "books").mkdir()
    for i in range(10):
        (tmp_path / "books" / f"{i}.txt").write_text(f"the {i}\n\n" * 3)
    return str(tmp_path / "books")


def test_a_token_ends_every_document_and_auto_is_bytes_where_gpt2s_files_are_not(books, tmp_path):
    text_tokens = tokens.load(books, tmp_path / "data", "auto", 0)
    document = b"the 9\n\n" * 3
    assert text_tokens.test.tolist() == [*document, 256] and text_tokens.test.dtype == np.uint16
    assert np.asarray(text_tokens.train).tolist().count(256) == 9
    assert text_tokens.bytes_per_token == pytest.approx(21 / 22) and text_tokens.origin.endswith(", bytes")
    assert not (tmp_path / "data" / "tokens").exists()


def test_tokens_of_gpt2_are_cached_and_a_damaged_file_is_written_again(books, tmp_path, encoding, monkeypatch):
    first_tokens = tokens.load(books, tmp_path / "data", "auto", 0)
    ours, _ = encoding
    assert first_tokens.test.tolist() == [*ours.encode(b"the 9\n\n" * 3).tolist(), ours.end]
    cached = sorted((tmp_path / "data" / "tokens").iterdir())
    assert len(cached) == 2 and {path.suffix for path in cached} == {".npy"}

    tokens.load.cache_clear()
    content = cached[0].read_bytes()
    cached[0].write_bytes(content[:-1])
    second_tokens = tokens.load(books, tmp_path / "data", "bpe", 0)
    assert cached[0].read_bytes() == content
    np.testing.assert_array_equal(first_tokens.train, second_tokens.train)

    tokens.load.cache_clear()
    monkeypatch.setattr(bpe.BPE, "encode", lambda *_: pytest.fail("cached tokens were encoded again"))
    np.testing.assert_array_equal(first_tokens.test, tokens.load(books, tmp_path / "data", "auto", 0).test)
    monkeypatch.undo()
    tokens.load.cache_clear()
    (tmp_path / "books" / "9.txt").write_text("another text")
    assert tokens.load(books, tmp_path / "data", "auto", 0).test.tolist() != first_tokens.test.tolist()


def test_a_data_folder_that_cannot_be_written_is_a_note_and_no_error(books, tmp_path, encoding, capsys):
    (tmp_path / "data" / "tokens").write_text("a file where the folder should be")
    assert len(tokens.load(books, tmp_path / "data", "bpe", 0).train)
    assert "note: the tokens are not cached for the next run" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "data")) == ["gpt2_bpe", "tokens"]


def test_sequences_are_cut_from_the_text_and_go_on_where_they_stopped():
    token_ids = jnp.arange(50, dtype=jnp.uint16)
    batches = text.sequences(token_ids, 5, 8, seed=3)
    first, second = next(batches), next(batches)
    assert first.dtype == np.int32 and first.shape == (8, 5)
    np.testing.assert_array_equal(first, first[:, :1] + np.arange(5))
    np.testing.assert_array_equal(second, next(text.sequences(token_ids, 5, 8, seed=3, start=1)))
    assert not np.array_equal(first, second)
    spread = np.concatenate(list(text.spread_sequences(token_ids, 5, 2, 2)))
    np.testing.assert_array_equal(spread[:, 0], [0, 15, 30, 45])
    with pytest.raises(data.DataError, match="shorter than the text of 50 tokens, got --context 50"):
        next(text.sequences(token_ids, 51, 1, seed=0))


def test_on_several_devices_the_batches_are_the_same_and_each_device_has_rows_of_its_own():
    token_ids, devices = jnp.arange(50, dtype=jnp.uint16), mesh.read("data=2,fsdp=2")
    row_slices = []

    def place(shape, rows):
        return mesh.spread(devices, shape, lambda row_slice: row_slices.append(row_slice) or rows(row_slice))

    for a, b in itertools.islice(
        zip(text.windows(token_ids, 4, 8, 3, 5), text.windows(token_ids, 4, 8, 3, 5, place=place), strict=False), 2
    ):
        for name in ("context", "target"):
            np.testing.assert_array_equal(a[name], b[name])
            assert a[name].dtype == b[name].dtype and b[name].addressable_shards[0].data.shape[0] == 2
    assert {(row_slice.start, row_slice.stop) for row_slice in row_slices} == {(0, 2), (2, 4), (4, 6), (6, 8)}
    for a, b in zip(text.spread(token_ids, 4, 3, 2), text.spread(token_ids, 4, 3, 2, place=place), strict=True):
        # Four devices do not divide three rows, so each device has all rows.
        np.testing.assert_array_equal(a["context"], b["context"])


# --- masking --------------------------------------------------------------------------------------------------------


def test_fifteen_percent_are_predicted_of_which_eighty_ten_and_ten_are_masked_random_and_unchanged():
    size, end = 50, 49
    shown = jax.random.randint(jax.random.key(1), (200, 500), 0, size, jnp.int32)
    draw = jax.jit(lambda key: mask(key, shown, size, size, end))
    (tokens_, targets), shown = map(np.asarray, draw(jax.random.key(0))), np.asarray(shown)
    chosen = targets != IGNORE
    np.testing.assert_array_equal(targets[chosen], shown[chosen])
    np.testing.assert_array_equal(tokens_[~chosen], shown[~chosen])
    assert not (targets == end).any()
    assert chosen[shown != end].mean() == pytest.approx(0.15, abs=0.005)
    hidden, same = tokens_[chosen] == size, tokens_[chosen] == shown[chosen]
    assert hidden.mean() == pytest.approx(0.8, abs=0.01)
    assert same.mean() == pytest.approx(0.1 + 0.1 / size, abs=0.01)
    drawn = tokens_[chosen][~hidden & ~same]
    assert np.bincount(drawn, minlength=size).min() > 0 and drawn.max() < size
    np.testing.assert_array_equal(draw(jax.random.key(0)).tokens, tokens_)
    assert not np.array_equal(draw(jax.random.key(2)).targets, targets)
