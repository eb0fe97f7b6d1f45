"""What the messages of a reply carry beside its text: aligned token by token, whatever the drafts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_chat import TOKENIZER
from fakes import FakeExecutor, fake_logprob, fake_top_logprobs
from live_server import LIMITS, failure_of, live_server, message, rest_of
from service.text.tokenizer import Tokenizer

INCLUDE = {
    "tokenIds": True,
    "tokenBytes": True,
    "logprobs": True,
    "topLogprobs": 3,
    "promptLogprobs": True,
}


def serve(checkpoint, **options):
    return live_server(checkpoint, executor=FakeExecutor(LIMITS, **options))


@pytest.mark.parametrize("accepts", [(0,), (2,), (1, 0, 2)])
async def test_pieces_are_aligned(checkpoint, tokenizer: Tokenizer, accepts):
    prompt = tokenizer.encode("the quick fox")
    async with serve(checkpoint, accepts=accepts) as live:
        request = message("the quick fox", include=INCLUDE, stopping={"maxTokens": 30})
        messages = await rest_of(live.inference.Generate(request))
        whole = await live.inference.Complete(request)
    started, told, *rest = messages
    assert started.HasField("started")
    assert list(told.prompt.token_ids) == list(prompt)
    assert list(told.prompt.logprobs) == pytest.approx([fake_logprob(t) for t in prompt[1:]])
    assert whole.prompt == told.prompt
    *deltas, end = rest
    assert end.HasField("finished")
    for piece in [*(m.delta for m in deltas), whole.choices[0].delta]:
        ids = list(piece.token_ids)
        assert ids
        assert list(piece.token_bytes) == [tokenizer.token_bytes(i) for i in ids]
        assert list(piece.logprobs) == pytest.approx([fake_logprob(i) for i in ids])
        tops = [list(zip(top.token_ids, top.logprobs, strict=True)) for top in piece.top_logprobs]
        assert tops == [list(fake_top_logprobs(i, 3)) for i in ids]
    ids = [i for m in deltas for i in m.delta.token_ids]
    assert ids == list(whole.choices[0].delta.token_ids)
    assert len(ids) == 30


async def test_choices_get_one_prompt(checkpoint):
    async with serve(checkpoint, seeded=True) as live:
        request = message(include={"promptLogprobs": True}, choices=2, stopping={"maxTokens": 5})
        messages = await rest_of(live.inference.Generate(request))
    kinds = [m.WhichOneof("kind") for m in messages]
    assert kinds[:2] == ["started", "prompt"]
    assert kinds.count("prompt") == 1
    assert [m.sequence for m in messages] == list(range(len(messages)))


async def test_nothing_comes_that_was_not_asked_for(checkpoint):
    async with serve(checkpoint) as live:
        whole = await live.inference.Complete(message(stopping={"maxTokens": 5}))
    delta = whole.choices[0].delta
    assert not whole.HasField("prompt")
    assert {field.name for field, _ in delta.ListFields()} <= {"index", "text"}


async def test_too_many_alternatives(checkpoint):
    async with serve(checkpoint) as live:
        failure = await failure_of(live.inference.Generate(message(include={"topLogprobs": 21})))
    assert failure.text == "include.top_logprobs is 21, must be in [0, 20]"


async def test_stop_strings_cut_everything_at_the_same_token(checkpoint, tokenizer: Tokenizer):
    """Case 19: whatever straddles whatever, and with the match shown or not."""
    ids = tokenizer.encode("The quick brown fox jumps over")
    for accepts, stop, shown in itertools.product(
        [(0,), (2,), (2, 1, 0)], ["wn f", "own fox j", "T", "r"], [False, True]
    ):
        async with serve(checkpoint, accepts=accepts, replies={"r": ids}) as live:
            stopping = {"stopStrings": [stop], "includeStopString": shown, "maxTokens": len(ids)}
            request = message(requestId="r", stopping=stopping, include=INCLUDE)
            whole = await live.inference.Complete(request)
        (choice,) = whole.choices
        delta, text = choice.delta, "The quick brown fox jumps over"
        end = text.index(stop)
        assert delta.text == text[: end + len(stop) * shown]
        assert choice.finished.stop_string == stop
        spelled = b"".join(delta.token_bytes).decode()
        assert spelled.startswith(text[: end + len(stop)])
        last = delta.token_bytes[-1].decode()
        assert len(spelled) - len(last) < end + len(stop)  # no token behind the match
        lengths = {len(delta.token_ids), len(delta.logprobs), len(delta.top_logprobs)}
        assert lengths == {len(delta.token_bytes)}


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_bytes_are_those_of_the_text(ids):
    """Any tokens: cut characters, control tokens, invalid bytes; against the library's decoder."""
    ids = [i for i in ids if i in TOKENIZER]
    spelled = b"".join(map(TOKENIZER.token_bytes, ids))
    assert spelled.decode(errors="replace") == TOKENIZER.decode(ids, include_special=True)
