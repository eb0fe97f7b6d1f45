"""Stop strings: the text shown is everything before the match, however the text was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text.stopping import StopMatcher

TEXT = "The quick brown fox jumps"


def run(stop_strings: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stop_strings), ""
    for piece in pieces:
        released = matcher.feed(piece)
        shown += released.text
        if released.stop_string is not None:
            return shown, released.stop_string
    return shown + matcher.flush(), None


def reference(stop_strings: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first end of a match counts, then the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cuts(text: str, sizes: list[int]) -> list[str]:
    pieces: list[str] = []
    for size in sizes:
        pieces, text = [*pieces, text[:size]], text[size:]
    return [*pieces, text]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 25])
def test_a_match_over_many_pieces_is_never_shown(size):
    assert run(["own fox"], cuts(TEXT, [size] * 25)) == ("The quick br", "own fox")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 25])
def test_a_match_that_never_completes_is_shown(size):
    assert run(["own foxy", "jumps!"], cuts(TEXT, [size] * 25)) == (TEXT, None)


def test_only_a_possible_match_is_held_back():
    matcher = StopMatcher(["own fox", "fog"])
    shown = [matcher.feed(piece).text for piece in ("brow", "n", " fo", "am", " f", "o")]
    assert shown == ["br", "", "", "own foam", " ", ""]
    assert matcher.flush() == "fo"
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "result"),
    [
        (["aab"], "aaab", ("a", "aab")),
        (["abab", "b"], "abab", ("a", "b")),
        (["xabc", "abc"], "xabc", ("", "xabc")),
        (["abc", "xabc"], "xabc", ("", "xabc")),
        (["aa"], "aaaa", ("", "aa")),
        (["漢字"], "漢漢字", ("漢", "漢字")),
        ([], "abc", ("abc", None)),
    ],
)
def test_which_match_counts(stops, text, result):
    assert run(stops, [text]) == result
    assert run(stops, list(text)) == result


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.text("abc", max_size=40),
    st.lists(st.integers(0, 6), max_size=30),
)
def test_cuts_change_nothing(stops, text, sizes):
    assert run(stops, cuts(text, sizes)) == reference(stops, text)


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3), st.text("ab"))
def test_nothing_is_held_back_that_cannot_become_a_match(stops, text):
    matcher, shown = StopMatcher(stops), ""
    for end, character in enumerate(text, start=1):
        released = matcher.feed(character)
        shown += released.text
        if released.stop_string is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
