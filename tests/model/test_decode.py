"""The equivalences that the decode program promises: float32, token for token."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from model import decode as decode_lib
from model import state as state_lib
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


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 129, 200])
def test_cached_decode_equals_full_forward_at_every_draft_length(driver, length):
    """Case 1. Lengths around every page (16) and chunk (64) border."""
    ids = prompt(length, seed=length)
    want = full_forward_greedy(ids, 24)
    for cap in CAPS:
        assert driver.run(Request("r", ids, 24, GREEDY), cap) == want, cap


@pytest.mark.slow
def test_twenty_prompts_of_1_to_600_tokens_give_one_reply_at_every_draft_length():
    """Case 1 as it is told: drafts off and 1 to 3, lengths around every border, 128 tokens."""
    executor = tiny.executor(MODEL, max_context=768, pages=1 + 4 * 48)
    lengths = [
        1,
        2,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        128,
        129,
        191,
        192,
        193,
        320,
        513,
        600,
    ]
    prompts = [prompt(length, seed=length) for length in lengths]
    replies = []
    for ids in prompts:
        driver = tiny.Driver(executor)
        for cap in CAPS:  # side by side: in company as well
            driver.start(cap, Request("r", ids, 128, GREEDY), cap)
        by_cap = driver.finish()
        assert all(by_cap[cap] == by_cap[0] for cap in CAPS), len(ids)
        replies.append(by_cap[0])
        sampled = Request("s", ids, 128, SamplingParams(temperature=1.0, seed=len(ids)))
        for cap in CAPS:
            driver.start(cap, sampled, cap)
        by_cap = driver.finish()
        assert all(by_cap[cap] == by_cap[0] for cap in CAPS), len(ids)
    for ids, reply in list(zip(prompts, replies, strict=True))[-3:]:
        assert reply[:16] == full_forward_greedy(ids, 16)


def checksum(state, slot: int, page_ids: list[int]) -> list[np.ndarray]:
    """Everything that belongs to one slot: its row of each per-slot array, and its pages."""
    slots = tiny.SHAPE.slots
    rows = [leaf for leaf in jax.tree.leaves(state) if leaf.shape[0] == slots]
    pages = [leaf for leaf in jax.tree.leaves(state) if leaf.shape[0] == tiny.SHAPE.pages]
    assert len(rows) + len(pages) == len(jax.tree.leaves(state))
    return [
        *(np.array(leaf[slot]) for leaf in rows),
        *(np.array(leaf[np.array(page_ids)]) for leaf in pages),
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_slots_that_are_not_used_are_not_written(count):
    """Case 5: committed state, settings and pages of the other slots stay as they are, bit for bit."""
    executor = tiny.executor(MODEL)
    driver = tiny.Driver(executor)
    for slot in range(4):  # something to lose in every slot
        driver.start(slot, Request("before", prompt(40, seed=slot), 9, GREEDY), 3)
    driver.finish()
    driver.step()  # commits what was pending
    unused = range(count, 4)
    before = [checksum(executor._state, slot, driver.pages[slot]) for slot in unused]
    for slot in range(count):
        driver.start(slot, Request("r", prompt(70, seed=slot), 64, GREEDY), 3, decode_between=True)
    driver.finish()
    after = [checksum(executor._state, slot, driver.pages[slot]) for slot in unused]
    jax.tree.map(np.testing.assert_array_equal, after, before)


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


def poisoned_executor(*known: int):
    """An executor for a model with one token whose embedding is not a number; the token."""
    poison = next(token for token in range(96) if token not in known)
    table = MODEL.embed_tokens.weight[...]
    leaves, treedef = jax.tree.flatten(MODEL)
    poisoned = [leaf.at[poison].set(jnp.nan) if leaf is table else leaf for leaf in leaves]
    assert sum(bool(np.isnan(leaf).any()) for leaf in poisoned) == 1
    return tiny.executor(jax.tree.unflatten(treedef, poisoned)), poison


def test_not_a_number_ends_its_request_and_reaches_no_other():
    """Case 31: neither the neighbours, nor the sink page, nor whoever gets slot and pages next."""
    ids, short = prompt(30, seed=7), prompt(2, seed=8)
    healthy = full_forward_greedy(ids, 24)
    executor, poison = poisoned_executor(*ids, *short, *healthy, *full_forward_greedy(short, 24))
    driver = tiny.Driver(executor)
    # A healthy slot with no more pages than it needs reads the sink page behind them.
    driver.pages[1] = driver.pages[1][:4]
    driver.start(0, Request("sick", (5, poison, *prompt(60)), 24, GREEDY), 3)
    driver.start(1, Request("healthy", ids, 24, GREEDY), 3)
    replies = driver.finish()
    assert replies == {0: [], 1: healthy}
    assert driver.rounds[0][-1].finish is FinishReason.NOT_FINITE
    for follower in (short, ids):
        want = full_forward_greedy(follower, 24)
        assert driver.run(Request("next", follower, 24, GREEDY), 3, slot=0) == want


def test_a_draft_that_is_not_a_number_is_rejected_and_leaves_no_trace():
    """Cases 7 and 31: the row of a draft must not reach the rows before it, nor the next rounds."""
    ids = prompt(21, seed=2)
    want = full_forward_greedy(ids, 40)
    executor, poison = poisoned_executor(*ids, *want)
    driver = tiny.Driver(executor)
    driver.start(0, Request("r", ids, 40, GREEDY), 3)
    while driver.active:
        state = executor._state
        executor._state = dataclasses.replace(state, drafts_BU=state.drafts_BU.at[0, 1].set(poison))
        driver.step()
    assert driver.replies[0] == want


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
    assert counts == {
        "decode": 4,
        "prefill": 2,
        "score": 2,
        "insert": 1,
        "release": 1,
        "set_draft_cap": 1,
    }
    driver = tiny.Driver(executor)
    for n in range(4):
        sampling = SamplingParams(temperature=n / 2, top_k=n, seed=n)
        driver.start(n, Request(str(n), prompt(70 * n + 1), 30, sampling), n, decode_between=True)
    executor.set_draft_cap(1, 2)
    driver.finish()
    assert executor.compile_counts() == counts


def test_state_is_donated_whole():
    """Every byte of the caches is updated in place: the program aliases them all."""
    shape = tiny.SHAPE
    state = jax.eval_shape(lambda: state_lib.init_state(MODEL.config, shape, jnp.float32))
    inputs = jax.eval_shape(lambda: state_lib.init_inputs(shape, MODEL.config.vocab_size))
    program = jax.jit(
        lambda model, state, inputs: decode_lib.decode_rounds(model, state, inputs, shape, 3),
        donate_argnums=1,
    )
    memory = program.lower(MODEL, state, inputs).compile().memory_analysis()
    expected = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.caches))
    assert memory is not None and memory.alias_size_in_bytes >= expected


def full_forward_logits(ids: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jax.jit(lambda tokens: MODEL.logits(MODEL(tokens)))(np.array([ids])))[0]


@pytest.mark.parametrize("cap", CAPS)
def test_top_logprobs_are_those_of_the_whole_sequence(driver, cap):
    """Case 24: one entry per token, aligned, the chosen one first when greedy."""
    ids = prompt(21, seed=3)
    driver.start(0, Request("r", ids, 24, GREEDY, logprobs=True, top_logprobs=5), cap)
    driver.start(1, Request("n", ids, 24, GREEDY), cap)
    reply = driver.finish()[0]
    top = [tokens for call in driver.rounds[0] for row in call.top_logprobs for tokens in row]
    assert len(top) == len(reply) == 24
    logits = full_forward_logits((*ids, *reply))[len(ids) - 1 : -1]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for row, tokens, chosen, own in zip(logprobs, top, reply, driver.logprobs[0], strict=True):
        assert [token for token, _ in tokens] == np.argsort(-row, kind="stable")[:5].tolist()
        np.testing.assert_allclose(
            [value for _, value in tokens], np.sort(row)[::-1][:5], atol=1e-4
        )
        assert tokens[0][0] == chosen
        assert tokens[0][1] == pytest.approx(own, abs=1e-6)
    assert not any(call.top_logprobs for call in driver.rounds[1])


@pytest.mark.parametrize("length", [2, 64, 65, 150])
def test_prompt_logprobs_are_those_of_the_whole_sequence(length):
    executor = shared_executor()
    driver = tiny.Driver(executor)
    ids = prompt(length, seed=length)
    chunk = executor.limits.prefill_chunk
    scores: list[float] = []
    for start in range(0, length - 1, chunk):
        end = min(start + chunk, length - 1)
        part = executor.prefill(0, driver.pages[0], start, ids[start:end], ids[end], score=True)
        assert part is not None
        scores += part.fetch()
    logprobs = np.asarray(jax.nn.log_softmax(full_forward_logits(ids)))
    want = logprobs[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(scores, want, atol=1e-4)
    request = Request("r", ids, 12, GREEDY)
    executor.insert(0, request, 3)
    driver.replies[0], driver.rounds[0], driver.logprobs[0] = [], [], []
    driver.active.add(0)
    assert driver.finish()[0] == full_forward_greedy(ids, 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 6, 7, 200])
def test_reasoning_ends_at_its_budget_at_every_draft_length(driver, budget, temperature):
    ids, end = prompt(17, seed=5), 77
    plain = Request("r", ids, 40, SamplingParams(temperature=temperature, seed=9))
    free = driver.run(plain, 3)
    assert end not in free[:8]
    limited = dataclasses.replace(plain, reasoning_end=end, max_reasoning_tokens=budget)
    replies = [driver.run(limited, cap) for cap in CAPS]
    assert all(reply == replies[0] for reply in replies)
    if budget == 200:
        assert replies[0] == free
    else:
        assert replies[0][:budget] == free[:budget]
        assert replies[0][budget] == end


def test_reasoning_that_ends_by_itself_has_no_budget_left_to_meet(driver):
    ids = prompt(17, seed=5)
    plain = Request("r", ids, 40, GREEDY)
    free = driver.run(plain, 3)
    limited = dataclasses.replace(plain, reasoning_end=free[3], max_reasoning_tokens=9)
    for cap in CAPS:
        assert driver.run(limited, cap) == free


def mask(tokens) -> bytes:
    """Bits of the tokens that are allowed."""
    bits = np.zeros(96, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def allowed_after(count: int) -> set[int]:
    """A made-up grammar: the place of a token decides which ones may stand there."""
    return {token for token in range(1, 96) if token % 5 == count % 5}


def constrained_reply(driver, request: Request, cap: int, hold: bool) -> list[int]:
    """Runs slot 0 under the grammar, a round at a time, beside a free slot."""
    driver.start(0, request, cap)
    while 0 in driver.active:
        calls = driver.rounds[0]
        drafts = calls[-1].next_drafts if calls else ()
        done = len(driver.replies[0])
        masks = [mask(allowed_after(done + t)) for t in range(len(drafts) + 1)]
        if hold:
            driver.step(held=(0,))
            assert driver.rounds[0].pop().tokens == [[], []]
        driver.step(allowed={0: masks})
    return driver.replies[0]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=4)])
def test_constrained_tokens_are_the_allowed_ones_and_do_not_depend_on_drafts(driver, sampling):
    """Also when the slot sits calls out, and the slot beside it is as it is alone."""
    ids = prompt(20, seed=6)
    request = Request("r", ids, 30, sampling)
    other = Request("o", prompt(33, seed=7), 90, SamplingParams(temperature=0.9, seed=1))
    alone = driver.run(other, 3, slot=1)
    replies = []
    for cap in CAPS:
        for hold in (False, True):
            driver.start(1, other, 3)
            replies.append(constrained_reply(driver, request, cap, hold))
            driver.finish()
            assert driver.replies[1] == alone
    assert all(token in allowed_after(n) for n, token in enumerate(replies[0]))
    assert all(reply == replies[0] for reply in replies)
    if sampling is GREEDY:
        seen = ids
        for n, token in enumerate(replies[0][:8]):
            row = full_forward_logits(seen)[-1]
            assert token == max(allowed_after(n), key=lambda t: row[t])
            seen = (*seen, token)


def test_a_slot_that_sits_rounds_out_goes_on_as_if_nothing_had_been(driver):
    request = Request("r", prompt(20, seed=6), 60, SamplingParams(temperature=0.9, seed=2))
    want = driver.run(request, 3)
    driver.start(0, request, 3)
    step = 0
    while driver.active:
        driver.step(held=(0,) if step % 3 else ())
        step += 1
    assert driver.replies[0] == want
