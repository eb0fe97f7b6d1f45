"""The equivalences that the decode program promises: float32, token for token."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from service.engine.types import FinishReason, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
MODEL = tiny.model()
CAPS = range(tiny.SHAPE.draft_length + 1)


@functools.cache
def shared_executor():
    executor = tiny.executor(MODEL)
    executor.warm_up()
    return executor


@pytest.fixture
def driver():
    return tiny.Driver(shared_executor())


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, 96, length).tolist())


@functools.cache
def full_forward_greedy(ids: tuple[int, ...], count: int) -> list[int]:
    """Greedy continuation by the whole-sequence forward pass: no cache, no drafts, no batch."""
    width = len(ids) + count
    logits = jax.jit(lambda tokens: MODEL.logits(MODEL(tokens)))
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    for at in range(len(ids), width):
        tokens[0, at] = int(jnp.argmax(logits(tokens)[0, at - 1]))
    return tokens[0, len(ids) :].tolist()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 66, 129, 200])
def test_cached_decode_equals_full_forward_at_every_draft_length(driver, length):
    """Case 1. Lengths around every page (16) and chunk (64) border."""
    ids = prompt(length, seed=length)
    want = full_forward_greedy(ids, 24)
    for cap in CAPS:
        assert driver.run(Request("r", ids, 24, GREEDY), cap) == want, cap


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.3, top_p=0.9, seed=4),
        SamplingParams(temperature=1.0, top_k=5, seed=5),
        SamplingParams(temperature=1.0, top_k=80, top_p=0.7, seed=6),
    ],
    ids=["plain", "top_p", "top_k", "both"],
)
def test_sampled_reply_does_not_depend_on_draft_length(driver, sampling):
    """Case 14, first half: the same seed gives the same tokens with and without drafts."""
    replies = [driver.run(Request("r", prompt(20), 48, sampling), cap) for cap in CAPS]
    assert all(reply == replies[0] for reply in replies)
    other = dataclasses.replace(sampling, seed=99)
    assert driver.run(Request("r", prompt(20), 48, other), 3) != replies[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_alone_equals_in_company(driver, count):
    """Cases 5, 16, 18, 27, 68: every concurrency, mixed lengths, caps and sampling, joining late."""
    requests = [
        Request(
            str(n),
            prompt((9, 200, 40, 1)[n], seed=n),
            (40, 17, 60, 33)[n],
            SamplingParams(temperature=n % 2, seed=n),
        )
        for n in range(count)
    ]
    alone = [driver.run(request, 3, slot=0) for request in requests]
    for order in (list(range(count)), list(reversed(range(count)))):
        together = tiny.Driver(shared_executor())
        for slot, n in enumerate(order):
            together.start(slot, requests[n], (3, 0, 1, 2)[n], decode_between=True)
            together.step()
        replies = together.finish()
        assert [replies[order.index(n)] for n in range(count)] == alone


@pytest.mark.parametrize("chunk", [8, 64, 100])
def test_chunked_prefill_equals_one_shot(chunk):
    """Case 9, also with decode calls of another request in between."""
    driver = tiny.Driver(tiny.executor(MODEL, prefill_chunk=chunk, max_context=256))
    driver.start(1, Request("other", prompt(5, seed=9), 150, GREEDY), 3)
    for length in (63, 64, 65, 129, 200):
        ids = prompt(length, seed=length)
        driver.active.discard(0)
        driver.start(0, Request("r", ids, 16, GREEDY), 3, decode_between=length % 2 == 0)
        while 0 in driver.active:
            driver.step()
        assert driver.replies[0] == full_forward_greedy(ids, 16), length


SETTINGS = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": ((7, 3.0), (8, -100.0), (9, 2.5))},
    "all": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": ((7, 3.0),),
        "temperature": 0.9,
        "min_p": 0.05,
        "seed": 5,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_penalties_and_bias_count_tokens_not_rounds(driver, name):
    """Case 10: equal to adjusting full-forward logits by hand, at every draft length."""
    sampling = SamplingParams(**{"temperature": 0.0, **SETTINGS[name]})
    ids = (5, 6, 7, 5, 6, 7, 5, 6, 7, 11, 5, 6)
    replies = [driver.run(Request("r", ids, 48, sampling), cap) for cap in CAPS]
    assert all(reply == replies[0] for reply in replies)
    plain = dataclasses.replace(
        sampling, repetition_penalty=1, frequency_penalty=0, presence_penalty=0, logit_bias=()
    )
    assert driver.run(Request("r", ids, 48, plain), 3) != replies[0]
    if sampling.temperature == 0:
        assert replies[0] == adjusted_greedy(ids, 48, sampling)


def adjusted_greedy(ids: tuple[int, ...], count: int, sampling: SamplingParams) -> list[int]:
    """Greedy continuation whose penalties and bias are applied in plain NumPy."""
    logits_of = jax.jit(lambda tokens: MODEL.logits(MODEL(tokens)))
    tokens = np.zeros((1, len(ids) + count), np.int32)
    tokens[0, : len(ids)] = ids
    for at in range(len(ids), tokens.shape[1]):
        logits = np.array(logits_of(tokens)[0, at - 1])
        for token, bias in sampling.logit_bias:
            logits[token] += np.float32(bias)
        reply = np.bincount(tokens[0, len(ids) : at], minlength=len(logits))
        seen = np.bincount(tokens[0, :at], minlength=len(logits)) > 0
        factor = np.float32(sampling.repetition_penalty)
        logits = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - np.float32(sampling.frequency_penalty) * reply.astype(np.float32)
        logits = logits - np.float32(sampling.presence_penalty) * (reply > 0)
        tokens[0, at] = logits.argmax()
    return tokens[0, len(ids) :].tolist()


def test_min_tokens_bars_the_end_exactly(driver):
    """Case 10, second half: the end token is biased to win, and comes right after min_tokens."""
    sampling = SamplingParams(temperature=0.0, logit_bias=((3, 100.0),))
    for cap in CAPS:
        request = Request("r", prompt(9), 60, sampling, end_ids=(3,), min_tokens=20)
        reply = driver.run(request, cap)
        assert len(reply) == 21 and reply[20] == 3 and 3 not in reply[:20]
        assert driver.rounds[0][-1].finish == FinishReason.END_OF_SEQUENCE


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_programs_of_all_draft_lengths_may_follow_each_other(driver, temperature):
    """A call may draft less or more than the one before; the reply is the same."""
    sampling = SamplingParams(temperature=temperature, seed=11)
    request = Request("r", prompt(37, seed=4), 90, sampling)
    want = driver.run(request, 3)
    driver.start(0, request, 3)
    call = 0
    while driver.active:
        driver.step(draft_length=(3, 0, 2, 1, 3, 1, 0, 0, 2)[call % 9])
        call += 1
    assert driver.replies[0] == want


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.2, seed=6)])
def test_logprobs_are_aligned_and_bitwise_equal_at_every_draft_length(driver, sampling):
    """Case 24: one per token, those of the whole-sequence forward pass, whatever was drafted."""
    ids = prompt(33, seed=8)
    request = Request("r", ids, 30, sampling, logprobs=True)
    replies = [(driver.run(request, cap), driver.logprobs[0]) for cap in CAPS]
    assert all(reply == replies[0] for reply in replies)
    reply, logprobs = replies[0]
    hidden = MODEL(jnp.asarray([[*ids, *reply]]))
    want = jax.nn.log_softmax(MODEL.logits(hidden), axis=-1)[0, len(ids) - 1 : -1]
    np.testing.assert_allclose(logprobs, want[jnp.arange(30), jnp.asarray(reply)], atol=1e-4)


def test_stop_ids_and_limits_end_a_slot_inside_the_program(driver):
    """Cases 12 and 26, on the device: stop beats length, counts are what was emitted."""
    ids = prompt(30, seed=5)
    want = full_forward_greedy(ids, 40)
    stop = want[6]
    first = want.index(stop)
    for cap in CAPS:
        for budget in (first, first + 1, first + 2, 40):
            request = Request("r", ids, max(budget, 1), GREEDY, stop_ids=(stop,))
            got = driver.run(request, cap)
            stopped = budget > first
            assert got == want[: first + 1 if stopped else max(budget, 1)]
            assert driver.rounds[0][-1].finish == (
                FinishReason.STOP if stopped else FinishReason.MAX_TOKENS
            )
        request = Request("r", ids, 40, GREEDY, end_ids=(stop,), stop_ids=())
        assert driver.run(request, cap)[-1] == stop
        assert driver.rounds[0][-1].finish == FinishReason.END_OF_SEQUENCE


@pytest.mark.parametrize("cap", CAPS)
def test_context_limit(driver, cap):
    ids = prompt(250, seed=6)
    reply = driver.run(Request("r", ids, 40, GREEDY), cap)
    assert len(ids) + len(reply) == tiny.SHAPE.max_context
    assert driver.rounds[0][-1].finish == FinishReason.CONTEXT_LENGTH
    assert reply == full_forward_greedy(ids, 6)


def test_counts_are_consistent(driver):
    driver.run(Request("r", prompt(12), 50, SamplingParams(temperature=1.5, seed=1)), 3)
    accepted_total = 0
    for call in driver.rounds[0]:
        for tokens, drafted, accepted in zip(call.tokens, call.drafted, call.accepted, strict=True):
            assert accepted <= drafted <= 3
            assert len(tokens) in ((accepted, accepted + 1) if tokens else (0,))
            accepted_total += accepted
    assert accepted_total > 0, "a random model at temperature 1.5 accepts some drafts by luck"


def hostile(state, pattern, choices, step):
    """Replaces the drafts by the model's own future (right), by others (wrong) or by a mixture."""
    right = jnp.asarray(choices)
    wrong = (right + 1) % 96
    good = {"wrong": 0, "right": 3, "irregular": (step * 7 + step // 3) % 4}[pattern]
    drafts = jnp.where(jnp.arange(3) < good, right, wrong)
    return dataclasses.replace(state, drafts_BU=state.drafts_BU.at[0].set(drafts))


@pytest.mark.parametrize("pattern", ["wrong", "right", "irregular"])
def test_hostile_drafts_leave_no_trace(pattern):
    """Case 7: whatever is proposed, the reply is the same; the slot is clean afterwards."""
    executor = tiny.executor(MODEL, rounds=1)
    driver = tiny.Driver(executor)
    ids = prompt(21, seed=2)
    want = full_forward_greedy(ids, 120)
    padded = want + [0] * 4
    driver.start(0, Request("r", ids, 120, GREEDY), 3)
    step = 0
    while driver.active:
        done = len(driver.replies[0])
        executor._state = hostile(executor._state, pattern, padded[done : done + 3], step)
        driver.step()
        step += 1
    assert driver.replies[0] == want
    accepted = sum(sum(call.accepted) for call in driver.rounds[0])
    rounds = len(driver.rounds[0])
    if pattern == "wrong":
        assert accepted == 0
    elif pattern == "right":
        assert rounds == 31  # no drafts in the first, then four tokens each, then what is left
    else:
        assert 31 < rounds < 119
    follower = Request("f", prompt(1, seed=3), 20, GREEDY)
    assert driver.run(follower, 3) == full_forward_greedy(follower.prompt_ids, 20)


def test_abort_between_draft_and_commit_leaves_the_slot_clean(driver):
    driver.start(2, Request("r", prompt(40), 100, SamplingParams(temperature=1.0, seed=8)), 3)
    driver.step()
    driver.executor.release(2)
    driver.active.discard(2)
    for length in (1, 2, 33):
        ids = prompt(length, seed=length)
        assert driver.run(Request("f", ids, 20, GREEDY), 3, slot=2) == full_forward_greedy(ids, 20)


def test_not_a_number_stays_inside_its_request():
    """Case 31: a slot whose hidden states are not finite does not reach its neighbours."""
    ids = prompt(30, seed=7)
    healthy = full_forward_greedy(ids, 24)
    poison = next(token for token in range(96) if token not in (*ids, *healthy))
    table = MODEL.embed_tokens.weight[...]
    leaves, treedef = jax.tree.flatten(MODEL)
    poisoned = [leaf.at[poison].set(jnp.nan) if leaf is table else leaf for leaf in leaves]
    assert sum(bool(np.isnan(leaf).any()) for leaf in poisoned) == 1
    driver = tiny.Driver(tiny.executor(jax.tree.unflatten(treedef, poisoned)))
    driver.start(0, Request("sick", (5, poison, 6, 7), 24, GREEDY), 3)
    driver.start(1, Request("healthy", ids, 24, GREEDY), 3)
    assert driver.finish()[1] == healthy
    assert driver.run(Request("next", ids, 24, GREEDY), 3, slot=0) == healthy


def test_rows_that_name_no_token_are_never_chosen():
    """The output head is padded: rows past the last token id must not win, drafted or sampled."""
    driver = tiny.Driver(tiny.executor(MODEL, addressable_tokens=40))
    for sampling in (GREEDY, SamplingParams(temperature=1.5, seed=2)):
        reply = driver.run(Request("r", prompt(9), 60, sampling), 3)
        assert max(reply) < 40


def test_nothing_compiles_after_warm_up():
    executor = tiny.executor(MODEL)
    executor.warm_up()
    counts = executor.compile_counts()
    assert counts == {"decode": 4, "prefill": 2, "insert": 1, "release": 1, "set_draft_cap": 1}
    driver = tiny.Driver(executor)
    for n in range(4):
        sampling = SamplingParams(temperature=n / 2, top_k=n, seed=n)
        driver.start(n, Request(str(n), prompt(70 * n + 1), 30, sampling), n, decode_between=True)
    executor.set_draft_cap(1, 2)
    driver.finish()
    assert executor.compile_counts() == counts


def test_state_is_donated_whole():
    """Every byte of the caches is updated in place: the program aliases them all."""
    from model import decode as decode_lib

    shape = tiny.SHAPE
    state = jax.eval_shape(lambda: decode_lib.init_state(MODEL.config, shape, jnp.float32))
    pages = jax.ShapeDtypeStruct((shape.slots, 16), jnp.int32)
    program = jax.jit(
        lambda model, state, pages: decode_lib.decode_rounds(model, state, pages, shape, 3),
        donate_argnums=1,
    )
    memory = program.lower(MODEL, state, pages).compile().memory_analysis()
    expected = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.caches))
    assert memory is not None and memory.alias_size_in_bytes >= expected
