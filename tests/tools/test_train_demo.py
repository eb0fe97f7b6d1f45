import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from model.kernels.routed_experts.reference import routed_experts
from service.text.chat import Tool
from service.text.chat_output import ChatOutputParser
from service.text.chat_template import ChatTemplate, ChatTemplateError
from service.text.output_events import ToolCallStart

pytest.importorskip("optax")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from demo_training import (
    batches,
    corpus,
    dialogues,
    experts,
    hub,
    loop,
    objective,
    packages,
    report,
    stages,
    state,
    tokenizer,
    tools,
)

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


def chats():
    """Of 120 functions, so that every choice is made somewhere."""
    documents = [corpus.Document(f"package/part_{i}.py", SOURCE) for i in range(60)]
    return [document.text for document in dialogues.dialogues(documents)]


def test_chats_are_in_the_words_of_the_chat_template():
    template = ChatTemplate(hub.CHAT_TEMPLATE.read_text())
    request = "Write the Python function count(words, *, start=0). Counts them."
    code = SOURCE[: SOURCE.index("\n\n\nclass")]
    prompt = template.render([{"role": "user", "content": request}])
    assert prompt + code + "<|im_end|>\n" in chats()
    thinking = template.render(
        [{"role": "user", "content": request}], variables={"enable_thinking": True}
    )
    assert any(thinking in text and text.endswith(code + "<|im_end|>\n") for text in chats())


def user(content):
    return {"role": "user", "content": content}


def test_the_chat_template_drops_the_reasoning_of_earlier_turns():
    template = ChatTemplate(hub.CHAT_TEMPLATE.read_text())
    call = {"function": {"name": "f", "arguments": {"n": 1, "text": "a"}}}
    called = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]}
    result = {"role": "tool", "content": "ok"}
    written = (
        "<|im_start|>assistant\n<think>\nr\n</think>\n\n<tool_call>\n<function=f>\n"
        "<parameter=n>\n1\n</parameter>\n<parameter=text>\na\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n"
    )
    assert written in template.render([user("a"), called, result])
    later = [user("a"), called, result, {"role": "assistant", "content": "done"}, user("b")]
    assert "<think>" not in template.render(later)
    assert written in template.render(later, variables={"preserve_thinking": True})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ([{"role": "system", "content": "a"}], "has not asked anything"),
        ([user("<tool_response>\na\n</tool_response>")], "has not asked anything"),
        ([user("a"), {"role": "system", "content": "b"}], "speaks first or not at all"),
        ([user("a"), {"role": "root", "content": "b"}], "of the system, the user"),
        ([user([{"type": "image"}])], "reads text only"),
        ([user(1)], "a text or a list of texts"),
    ],
)
def test_the_chat_template_refuses(messages, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(hub.CHAT_TEMPLATE.read_text()).render(messages)


def test_the_embedded_checkpoint_has_this_template():
    embedded = Path(__file__).parents[2] / "model" / "demo" / hub.CHAT_TEMPLATE.name
    assert embedded.read_text() == hub.CHAT_TEMPLATE.read_text()


def test_calls_in_chats_are_read_as_calls_of_an_offered_tool():
    schemas = [tool.schema()["function"] for tool in tools.TOOLS]
    offered = [Tool(schema["name"], parameters=schema["parameters"]) for schema in schemas]
    called = set()
    for text in chats():
        head, *replies = text.split("<|im_start|>assistant\n")
        if "<tools>" not in head:
            assert "<tool_call>" not in text
            continue
        reply = replies[0].split("<|im_end|>")[0]
        parser = ChatOutputParser("qwen3", tools=offered)
        events = [*parser.feed(reply), *parser.finish()]
        [call] = [event for event in events if isinstance(event, ToolCallStart)]
        assert f'"name": "{call.name}"' in head
        called.add(call.name)
    assert called == {tool.name for tool in offered}


def test_chats_depend_on_the_sources_alone():
    assert chats() == chats()


def test_packages_are_pinned_and_permissively_licensed():
    pinned = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in packages.PACKAGES:
        assert re.search(rf'"{name}(\[\w+\])?==', pinned), name
    documents, listed = packages.find_packages()
    assert [entry["name"] for entry in listed] == list(packages.PACKAGES)
    for entry in listed:
        assert re.search("MIT|BSD|Apache|Python Software Foundation", entry["licence"]), entry
        assert not re.search("GPL|MPL", entry["licence"]), entry
    paths = [document.path for document in documents]
    assert len(paths) == len(set(paths)) == sum(entry["files"] for entry in listed)
    assert "jinja2/environment.py" in paths
    assert not any("tests" in path.split("/") for path in paths)


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


STREAM = np.random.default_rng(0).integers(0, 96, 500).astype(np.uint16)
STREAMS = {"library": STREAM, "chat": STREAM[::-1]}
STAGE = stages.Stage(
    "tiny",
    steps=4,
    peak_rate=1e-2,
    warmup_steps=1,
    decay_share=0.5,
    shares={"library": 0.5, "chat": 0.5},
    draft_weights=(0.3, 0.1),
    short=(2, 16),
    long_share=0.0,
)


@pytest.fixture(scope="module")
def steps():
    """Steps are compiled once."""
    made = {}

    def step(stage):
        if stage.name not in made:
            made[stage.name] = state.make_step(state.initial_model(tiny.config(), seed=3), stage)
        return made[stage.name]

    return step


def fresh_state(stage=STAGE):
    model = state.initial_model(tiny.config(), seed=3)
    leaves = jax.tree.leaves(model)
    return state.TrainingState(leaves, state.make_optimiser(model, stage).init(leaves), 0, {})


def test_a_run_that_was_killed_ends_like_one_that_was_not(tmp_path, steps):
    whole = loop.advance(fresh_state(), STAGE, 3, STREAMS, steps(STAGE))

    class Killed(Exception):
        pass

    def kill_after_two(current):
        if current.step == 2:
            state.save(tmp_path / "state.npz", current)
            raise Killed

    with pytest.raises(Killed):
        loop.advance(fresh_state(), STAGE, 3, STREAMS, steps(STAGE), kill_after_two)
    saved = state.load(tmp_path / "state.npz", fresh_state())
    resumed = loop.advance(saved, STAGE, 3, STREAMS, steps(STAGE))
    assert resumed.step == whole.step == 4
    for actual, expected in zip(
        jax.tree.leaves((resumed.leaves, resumed.optimiser)),
        jax.tree.leaves((whole.leaves, whole.optimiser)),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


def test_a_stage_for_drafts_changes_the_draft_head_alone(steps):
    stage = dataclasses.replace(
        STAGE, name="drafts", draft_weights=(1.0, 0.7, 0.5), drafts_only=True
    )
    before = fresh_state(stage)
    paths = jax.tree_util.tree_flatten_with_path(state.initial_model(tiny.config(), seed=3))[0]
    old = [np.asarray(leaf) for leaf in before.leaves]
    after = loop.advance(before, stage, 3, STREAMS, steps(stage))
    for (path, _), was, is_ in zip(paths, old, after.leaves, strict=True):
        name = jax.tree_util.keystr(path)
        # Experts that no token chose stay as they are but for the decay of their weights.
        assert np.array_equal(was, is_) is (".mtp" not in name), name
    first, last = after.notes["history"][0], after.notes["history"][-1]
    assert set(first) >= {"draft_1", "draft_2", "draft_3"}
    assert last["step"] == 4


def test_the_distance_of_distributions_is_least_at_the_wanted_one():
    wanted = jax.random.normal(jax.random.key(0), (2, 3, 8))
    other = jax.random.normal(jax.random.key(1), (2, 3, 8))
    least = objective.distance(wanted, wanted)
    p = jax.nn.softmax(wanted)
    np.testing.assert_allclose(least, -jnp.sum(p * jnp.log(p), axis=-1), rtol=1e-5)
    assert np.all(objective.distance(other, wanted) > least)
    certain = 100.0 * jax.nn.one_hot(jnp.ones((2, 3), int), 8)
    np.testing.assert_allclose(
        objective.distance(other, certain),
        objective.cross_entropy(other, jnp.ones((2, 3), int)),
        rtol=1e-5,
    )


def test_windows_are_drawn_by_share_and_depend_on_seed_and_step():
    streams = {"a": np.zeros(99, np.uint16), "b": np.ones(99, np.uint16)}
    drawn = batches.draw(streams, {"a": 0.2, "b": 0.8}, (0, 1), 1000, 4)
    assert drawn.shape == (1000, 4)
    assert drawn.mean() == pytest.approx(0.8, abs=0.05)
    again = batches.draw(streams, {"a": 0.2, "b": 0.8}, (0, 1), 1000, 4)
    other = batches.draw(streams, {"a": 0.2, "b": 0.8}, (0, 2), 1000, 4)
    assert np.array_equal(drawn, again)
    assert not np.array_equal(drawn, other)


measure = jax.jit(objective.measure)
WINDOWS = np.random.default_rng(1).integers(0, 96, (4, 21)).astype(np.int32)


def test_held_out_figures_of_a_model_that_knows_nothing():
    model = jax.tree.map(jnp.zeros_like, tiny.model())
    figures = objective.evaluate(lambda y: measure(model, y), WINDOWS, rows=2)
    # All logits are equal: 96 tokens are 6.58 bits, and every argmax is token 0.
    assert figures.bits_per_token == pytest.approx(np.log2(96), abs=1e-4)
    assert figures.acceptance == figures.accepted_chain == (1.0,) * 4
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


def test_a_stage_ends_with_long_windows_of_as_many_tokens():
    for stage in stages.STAGES:
        shapes = [stage.shape(step) for step in range(stage.steps)]
        long = shapes.count(stage.long)
        assert shapes == [stage.short] * (stage.steps - long) + [stage.long] * long
        assert long == pytest.approx(stage.long_share * stage.steps, abs=1)
        assert np.prod(stage.short) == np.prod(stage.long)
        assert sum(stage.shares.values()) == pytest.approx(1)


def test_a_report_keeps_the_stages_before(tmp_path):
    held_out = [{"step": 4, "library": {"bits_per_byte": 2.0, "acceptance": (0.5, 0.25)}}]
    history = [{"step": step, "loss": 3.0, "draft_1": 4.0} for step in (2, 4)]
    for stage in (stages.STAGES[1], stages.STAGES[0]):
        figures = {
            "stage": dataclasses.asdict(stage),
            "steps_done": 4,
            "held_out": held_out,
            "history": history,
        }
        report.write(tmp_path, figures, {"model_type": "m"}, {"packages": []})
    told = json.loads((tmp_path / "training.json").read_text())
    assert list(told["stages"]) == [stage.name for stage in stages.STAGES[:2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data.json",
        "loss.png",
        "training.json",
    ]
