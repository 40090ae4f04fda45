"""Patterns on module paths and classes."""

from __future__ import annotations

import itertools
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxmp.policy.patterns import is_class_pattern, matches, pattern_text

pytestmark = pytest.mark.once


class Norm:
    pass


class BatchNorm(Norm):
    pass


def path(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("/")))


GLOBS = [
    ("encoder", "encoder", "decoder encoder/Dense_0 a/encoder Encoder"),
    ("*", "encoder Dense_0", "encoder/Dense_0"),
    ("*/Dense_?", "a/Dense_0 b/Dense_1", "Dense_0 a/Dense_10 a/b/Dense_0"),
    ("Dense_[01]", "Dense_0 Dense_1", "Dense_2"),
    ("**", "a a/b a/b/c", ""),
    ("**/Dense_0", "Dense_0 a/Dense_0 a/b/Dense_0", "Dense_0/a Dense_1"),
    ("a/**", "a a/b a/b/c", "b b/a"),
    ("a/**/b", "a/b a/x/b a/x/y/b", "a b a/b/x"),
    ("**/a/**/b", "a/b x/a/b x/a/y/b", "a b/a"),
    ("**/*_0", "Dense_0 a/Dense_0", "Dense_1 Dense_0/a"),
    ("a**", "a abc", "a/b"),
    ("/encoder/", "encoder", "decoder"),
    ("a//b", "a/b", "a"),
]


def test_a_glob_matches_whole_paths_level_by_level():
    for pattern, hits, misses in GLOBS:
        assert [hit for hit in hits.split() if not matches(pattern, path(hit), None)] == [], pattern
        assert [miss for miss in misses.split() if matches(pattern, path(miss), None)] == [], pattern


def test_the_root_is_matched_by_nothing_but_stars_that_cross_levels():
    assert matches("**", (), None)
    assert matches("", (), None)
    assert not matches("*", (), None)


def test_a_class_matches_itself_and_its_subclasses_and_no_path():
    assert matches(Norm, ("a",), BatchNorm)
    assert matches(BatchNorm, (), BatchNorm)
    assert not matches(BatchNorm, ("a",), Norm)
    assert not matches(Norm, ("Norm",), None)


def test_a_pattern_on_the_name_of_a_class_looks_at_its_bases_too_and_at_whole_names_with_their_case():
    for pattern in ("type:BatchNorm", "type:*Norm", "type:Norm", "type:Batch*", "type:object"):
        assert matches(pattern, ("a",), BatchNorm), pattern
        assert not matches(pattern, ("BatchNorm",), None), pattern
    for pattern in ("type:Batch", "type:batchnorm"):
        assert not matches(pattern, (), BatchNorm), pattern


def test_a_class_written_as_text_is_the_pattern_on_its_name():
    assert pattern_text(BatchNorm) == "type:BatchNorm"
    assert pattern_text("**/head") == "**/head"
    assert [is_class_pattern(pattern) for pattern in (BatchNorm, "type:BatchNorm", "BatchNorm_0")] == [
        True,
        True,
        False,
    ]


NAMES = st.lists(st.sampled_from(["a", "b", "ab"]), max_size=4)
PARTS = st.lists(st.sampled_from(["a", "b", "*", "**", "a*", "?"]), max_size=4)


@hypothesis.given(PARTS, NAMES)
def test_stars_mean_what_a_search_through_every_expansion_says(pattern, names):
    def expansions(part):
        return [["?*"] * depth for depth in range(5)] if part == "**" else [[part]]

    def level(glob, name):
        return re.fullmatch(glob.replace("*", ".*").replace("?.*", ".+").replace("?", "."), name) is not None

    globs = [list(itertools.chain(*choice)) for choice in itertools.product(*map(expansions, pattern))]
    expected = any(len(glob) == len(names) and all(map(level, glob, names)) for glob in globs)
    assert matches("/".join(pattern), tuple(names), None) == expected
