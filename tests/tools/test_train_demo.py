import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from model.kernels.routed_experts.reference import routed_experts

pytest.importorskip("optax")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from demo_training import corpus, experts, hub, loop, objective, state, tokenizer

SOURCE = '''\
def count(words, *, start=0):
    """Counts them."""
    total = start
    for word in words:
        total += 1
    return total


class Tally:
    def add(self, n):
        self.n += n
        return self
'''


@functools.cache
def trained_tokenizer():
    return tokenizer.train([SOURCE * 20], 400)


@pytest.mark.parametrize(
    "text",
    [
        SOURCE,
        "\tif x:\r\n\t\treturn 'ünï' # 漢字 \U0001f600  \n\n\n   \n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n</think>x<|endoftext|>",
    ],
)
def test_tokenizer_gives_every_text_back(text):
    ids = trained_tokenizer().encode(text).ids
    assert trained_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_each_added_token_is_one_id_and_only_control_tokens_are_hidden():
    for token in (*tokenizer.CONTROL_TOKENS, *tokenizer.MARKUP_TOKENS):
        [id_] = trained_tokenizer().encode(token).ids
        shown = trained_tokenizer().decode([id_], skip_special_tokens=True)
        assert shown == ("" if token in tokenizer.CONTROL_TOKENS else token)


def test_indentation_goes_with_the_line_break():
    assert "):Ċ" + 4 * "Ġ" in trained_tokenizer().encode("def f(x):\n    return x").tokens


def test_cuts_change_tokens_but_not_the_text():
    document = corpus.Document("a.py", SOURCE * 30)
    encode = functools.partial(tokenizer.encode, trained_tokenizer(), [document, document])
    cut, whole = encode(cut=True), encode(cut=False)
    assert len(cut) > len(whole)
    np.testing.assert_array_equal(cut, encode(cut=True))
    decode = functools.partial(trained_tokenizer().decode, skip_special_tokens=False)
    assert decode(cut.tolist()) == decode(whole.tolist()) == 2 * (document.text + "<|endoftext|>")


def test_the_split_depends_on_the_path_alone():
    assert [
        path for path in ("abc.py", "ast.py", "json/decoder.py") if corpus.is_held_out(path)
    ] == []
    assert corpus.is_held_out("pdb.py") is corpus.is_held_out("pdb.py")
    share = np.mean([corpus.is_held_out(f"package/module_{i}.py") for i in range(20_000)])
    assert share == pytest.approx(0.03, abs=0.005)


def test_only_readable_hand_written_sources_are_found(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "site-packages").mkdir()
    for name in ("a.py", "test/test_a.py", "site-packages/b.py"):
        (tmp_path / name).write_text(SOURCE)
    (tmp_path / "table.py").write_text("codes = (" + "0x12, " * 100 + ")")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    found = corpus.find_documents(tmp_path)
    assert {name: [d.path for d in documents] for name, documents in found.items()} == {
        "library": ["a.py"],
        "tests": ["test/test_a.py"],
    }


def test_conversations_are_in_the_words_of_the_chat_template():
    jinja2 = pytest.importorskip("jinja2")
    first, second = corpus.conversations([corpus.Document("a.py", SOURCE)])
    template = jinja2.Environment().from_string(hub.CHAT_TEMPLATE)
    request = "Write the Python function count(words, *, start=0). Counts them."
    code = SOURCE[: SOURCE.index("\n\n\nclass")]
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": code}]
    assert first.text == template.render(messages=messages)
    prompt = template.render(messages=messages[:1], add_generation_prompt=True)
    assert first.text == prompt + code + "<|im_end|>\n"
    assert second.text.endswith(
        "assistant\ndef add(self, n):\n    self.n += n\n    return self<|im_end|>\n"
    )


def expert_case(tokens=40, experts_=6, chosen=2, width=8, hidden=4):
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, width))
    weights, ids = jax.lax.top_k(
        jax.nn.softmax(2 * jax.random.normal(keys[1], (tokens, experts_))), chosen
    )
    gate_up = jax.random.normal(keys[2], (experts_, 2 * hidden, width))
    down = jax.random.normal(keys[3], (experts_, width, hidden))
    target = jax.random.normal(keys[4], (tokens, width))
    return x, ids, weights, gate_up, down, target


def test_experts_with_room_equal_the_reference_and_so_do_their_gradients():
    x, ids, weights, gate_up, down, target = expert_case()
    ids = ids.at[3, 1].set(len(gate_up))  # chooses none

    def loss(function, x, weights, gate_up, down):
        return jnp.sum(function(x, ids, weights, gate_up, down) * target)

    arguments = (x, weights, gate_up, down)
    roomy = experts.CapacityExperts(capacity_factor=6.0)
    got, want = (
        jax.value_and_grad(functools.partial(loss, function), argnums=(0, 1, 2, 3))(*arguments)
        for function in (roomy, routed_experts)
    )
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_overflow_drops_the_last_choices_and_is_counted():
    slot, choice, kept = experts.assign(jnp.array([[0, 1], [0, 2], [0, 1]]), experts=3, room=2)
    np.testing.assert_array_equal(slot, [[0, 2], [1, 4], [6, 3]])
    np.testing.assert_array_equal(choice, [0, 2, 1, 5, 3, 6])
    assert float(kept) == pytest.approx(5 / 6)


def test_balance_is_one_when_all_experts_are_used_alike():
    x, _, _, gate_up, down, _ = expert_case(tokens=6)
    even = experts.CapacityExperts(2.0)
    ids = jnp.stack([jnp.arange(6), (jnp.arange(6) + 1) % 6], axis=1)
    even(x, ids, jnp.full(ids.shape, 0.5), gate_up, down)
    assert float(even.balance[0]) == pytest.approx(1.0)


@functools.cache
def tiny_step(steps):
    treedef = jax.tree.structure(state.initial_model(tiny.config(), seed=3))
    return state.make_step(treedef, state.make_optimiser(steps))


def tiny_run(steps):
    plan = loop.Plan(seed=3, steps=steps, short=(2, 16), long_share=0.0)
    model = state.initial_model(tiny.config(), seed=3)
    leaves = jax.tree.leaves(model)
    fresh = state.TrainingState(leaves, state.make_optimiser(steps).init(leaves), 0, {})
    stream = np.random.default_rng(0).integers(0, 96, 500).astype(np.uint16)
    streams = {"library": stream, "chat": stream[::-1]}
    return fresh, plan, streams, tiny_step(steps)


def test_a_run_that_was_killed_ends_like_one_that_was_not(tmp_path):
    fresh, plan, streams, train_step = tiny_run(4)
    whole = loop.advance(fresh, plan, streams, train_step)

    class Killed(Exception):
        pass

    def kill_after_two(current):
        if current.step == 2:
            state.save(tmp_path / "state.npz", current)
            raise Killed

    fresh, plan, streams, train_step = tiny_run(4)
    with pytest.raises(Killed):
        loop.advance(fresh, plan, streams, train_step, kill_after_two)
    like, plan, streams, train_step = tiny_run(4)
    resumed = loop.advance(state.load(tmp_path / "state.npz", like), plan, streams, train_step)
    assert resumed.step == whole.step == 4
    for actual, expected in zip(
        jax.tree.leaves((resumed.leaves, resumed.optimiser)),
        jax.tree.leaves((whole.leaves, whole.optimiser)),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


measure = jax.jit(objective.measure)
WINDOWS = np.random.default_rng(1).integers(0, 96, (4, 20)).astype(np.int32)


def test_held_out_figures_of_a_model_that_knows_nothing():
    model = jax.tree.map(jnp.zeros_like, tiny.model())
    figures = objective.evaluate(lambda y: measure(model, y), WINDOWS, rows=2)
    # All logits are equal: 96 tokens are 6.58 bits, and every argmax is token 0.
    assert figures.bits_per_token == pytest.approx(np.log2(96), abs=1e-4)
    assert figures.acceptance == figures.accepted_chain == (1.0, 1.0, 1.0)
    assert figures.tokens == 4 * 16


def test_draft_acceptance_is_the_share_of_the_models_own_choices():
    model = tiny.model()
    figures = objective.evaluate(lambda y: measure(model, y), WINDOWS, rows=2)

    @jax.jit
    def choices(model, windows):
        hidden = model(windows)
        drafted = model.logits(model.draft(hidden[:, :16], windows[:, 1:17]))
        return jnp.argmax(model.logits(hidden)[:, 1:17], axis=-1), jnp.argmax(drafted, axis=-1)

    chosen, drafted = choices(model, WINDOWS)
    assert figures.acceptance[0] == pytest.approx(np.mean(drafted == chosen))
    assert figures.accepted_chain[1] <= min(figures.acceptance[:2])


def test_the_exported_directory_loads_as_a_checkpoint(tmp_path):
    from model import checkpoint

    hf_config = hub.model_config(trained_tokenizer())
    text = {**tiny.HF_CONFIG, "vocab_size": hf_config["text_config"]["vocab_size"]}
    hf_config = {**hf_config, "text_config": text}
    model = state.initial_model(tiny.config(vocab_size=text["vocab_size"]), seed=0)
    for _ in range(2):  # the second replaces the first
        hub.export(tmp_path / "export", hf_config, model, trained_tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    loaded = checkpoint.load(tmp_path / "export", jnp.float32)
    assert loaded.notices == ()
    for actual, expected in zip(jax.tree.leaves(loaded.model), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0.01)


def test_a_plan_ends_with_long_windows_of_as_many_tokens():
    plan = loop.Plan(seed=0, steps=100)
    shapes = [plan.shape(step) for step in range(100)]
    assert shapes == [plan.short] * 90 + [plan.long] * 10
    assert np.prod(plan.short) == np.prod(plan.long)
    seconds = {plan.short: 1.0, plan.long: 2.0}
    assert loop.measure_steps(plan, 11.0, seconds.__getitem__) == 600
    assert dataclasses.replace(plan, steps=10).shape(9) == plan.long
