"""The joined stream equals decoding all ids at once, in whole characters, at a constant cost."""

import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from service.text.detokenizer import Detokenizer
from service.text.tokenizer import Tokenizer

REAL = Path(__file__).resolve().parents[3] / "shared" / "qwen36"
TEXTS = [
    "👨\u200d👩\u200d👧\u200d👦 family",
    "漢字 and kana かな",
    "e\u0301 and é",
    "हिन्दी क्षत्रिय",
    "naïve \ufffd already there",
    "<tool call>x</tool_call><think>\n\t",
    "𠜎\U0010ffff\x00\x7f",
]


@pytest.fixture(scope="module")
def real_tokenizer() -> Tokenizer:
    if not (REAL / "tokenizer.json").is_file():
        pytest.skip(f"the Qwen3.6 tokenizer is not in {REAL.parent.name}/{REAL.name}")
    return Tokenizer.from_directory(REAL)


@pytest.fixture(params=["tiny", "real"])
def any_tokenizer(request) -> Tokenizer:
    name = "tokenizer" if request.param == "tiny" else "real_tokenizer"
    return request.getfixturevalue(name)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.feed, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole(any_tokenizer, text):
    token_ids = any_tokenizer.encode(text)
    streamed = pieces(any_tokenizer, list(token_ids))
    assert "".join(streamed) == any_tokenizer.decode(token_ids)
    assert "".join(streamed).count("\ufffd") == text.count("\ufffd")
    assert streamed[-1] == ""


@pytest.mark.parametrize("text", TEXTS)
def test_a_reply_may_end_inside_a_character(any_tokenizer, text):
    token_ids = any_tokenizer.encode(text)
    for end in range(len(token_ids) + 1):
        cut = token_ids[:end]
        assert "".join(pieces(any_tokenizer, list(cut))) == any_tokenizer.decode(cut)


@given(data=st.data())
def test_any_ids_of_the_tiny_vocabulary(tokenizer, data):
    known = [token_id for token_id in range(400) if token_id in tokenizer]
    token_ids = data.draw(st.lists(st.sampled_from(known), max_size=30))
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, 248_319), max_size=20))
def test_any_ids_of_the_real_vocabulary(real_tokenizer, token_ids):
    assert "".join(pieces(real_tokenizer, token_ids)) == real_tokenizer.decode(token_ids)


@given(raw=st.binary(max_size=24))
def test_any_bytes(tokenizer, raw):
    single = {tokenizer.token_bytes(i): i for i in range(400) if len(tokenizer.token_bytes(i)) == 1}
    token_ids = [single[bytes([byte])] for byte in raw]
    streamed = pieces(tokenizer, token_ids)
    assert "".join(streamed) == tokenizer.decode(token_ids) == raw.decode(errors="replace")


def test_invalid_bytes_do_not_stall_the_stream(tokenizer):
    lead = next(i for i in range(400) if tokenizer.token_bytes(i) == b"\xf0")
    streamed = pieces(tokenizer, [lead] * 100)
    assert streamed == ["", *["\ufffd"] * 100]


def test_a_long_reply_costs_no_more_per_token(tokenizer):
    lead = next(i for i in range(400) if tokenizer.token_bytes(i) == b"\xf0")
    detokenizer = Detokenizer(tokenizer)

    def seconds(count: int) -> float:
        started_at = time.perf_counter()
        for _ in range(count):
            detokenizer.feed(lead)
        return time.perf_counter() - started_at

    first = min(seconds(2000) for _ in range(3))
    seconds(100_000)
    assert min(seconds(2000) for _ in range(3)) < 5 * first


def test_token_bytes_join_to_the_text(any_tokenizer):
    text = "".join(TEXTS)
    spelled = b"".join(map(any_tokenizer.token_bytes, any_tokenizer.encode(text)))
    assert spelled.decode() == any_tokenizer.decode(
        any_tokenizer.encode(text), include_special=True
    )


def test_control_tokens_have_no_text(tokenizer, card):
    (end_id,) = card.end_ids
    assert tokenizer.encode("fox<|end|>")[-1] == end_id
    assert tokenizer.decode([end_id]) == "".join(pieces(tokenizer, [end_id])) == ""
    assert tokenizer.decode([end_id], include_special=True) == "<|end|>"


def test_rows_without_a_token_have_no_text(tokenizer):
    assert 399 not in tokenizer
    assert pieces(tokenizer, [399]) == ["", ""]


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="only ByteLevel"):
        Tokenizer(backend)
