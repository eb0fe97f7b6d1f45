"""Which tokens may follow, for every kind of grammar, against what the bytes of the tokens say."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.engine.errors import ConstraintError
from service.model_card import ModelCard
from service.text.grammar import (
    CACHED_GRAMMARS,
    MAX_GRAMMAR_BYTES,
    Grammar,
    GrammarCompiler,
    GrammarError,
)
from service.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "model" / "demo"
REAL = Path(__file__).parents[3] / "shared" / "qwen36"
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
DEAD_END = 'start: "x" A\nA: /[ab]+/ & /[cd]+/'


class Vocabulary:
    """A tokenizer, its end ids, and a compiler for it."""

    def __init__(self, directory: Path, rows: int) -> None:
        self.tokenizer = Tokenizer.from_directory(directory)
        self.end_ids = set(ModelCard.from_directory(directory).end_ids)
        self.rows = rows
        self.compiler = GrammarCompiler(directory / "tokenizer.json", rows, self.end_ids)
        self.text_ids = {
            i
            for i in range(rows)
            if i in self.tokenizer and i not in self.tokenizer.added_tokens.values()
        }
        self.id_of_byte = {
            self.tokenizer.token_bytes(i): i
            for i in self.text_ids
            if len(self.tokenizer.token_bytes(i)) == 1
        }

    def bits(self, mask: bytes) -> set[int]:
        return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}

    def in_bytes(self, text: str) -> list[int]:
        """One token for each byte of a text."""
        return [self.id_of_byte[bytes([byte])] for byte in text.encode()]

    def meets(self, grammar: Grammar, text: str) -> bool:
        """Whether a text can be spelled in a reply: takes the longest token allowed each time."""
        matcher, rest = grammar.matcher(), text.encode()
        while rest:
            fitting = [
                token
                for token in self.bits(matcher.masks(())[0]) - self.end_ids
                if rest.startswith(self.tokenizer.token_bytes(token))
            ]
            if not fitting:
                return False
            token = max(fitting, key=lambda token: len(self.tokenizer.token_bytes(token)))
            matcher.accept((token,))
            rest = rest[len(self.tokenizer.token_bytes(token)) :]
        allowed = self.bits(matcher.masks(())[0])
        assert not allowed & self.end_ids or allowed >= self.end_ids
        return allowed >= self.end_ids


@pytest.fixture(scope="module")
def demo() -> Vocabulary:
    return Vocabulary(DEMO, rows=4100)


@pytest.fixture(scope="module", params=["tiny", "demo", "real"])
def any_vocabulary(request, checkpoint, demo) -> Vocabulary:
    if request.param == "demo":
        return demo
    if request.param == "tiny":
        return Vocabulary(checkpoint, 384)
    if not (REAL / "tokenizer.json").exists():
        pytest.skip("the tokenizer of Qwen3.6 is not here")
    return Vocabulary(REAL, 248320)


GOOD = {
    "json_schema": (
        PERSON,
        [
            '{"name":"Ada","age":36}',
            '{"name": "Ada", "age": 36, "tags": ["a", "b"]}',
            '{\n    "name": "é \\" \\n",\n    "age": 0\n}',
        ],
        [
            '{"name":"Ada","age":151}',
            '{"name":"Ada"}',
            '{"name":"Ada","age":36,"x":1}',
            '{"name":"Ada","age":"36"}',
            '{"name":"Ada","age":36',
            '```json\n{"name":"Ada","age":36}\n```',
        ],
    ),
    "json_object": ("", ["{}", '{"a": [1, {"b": null}], "": -1.5e3}'], ["[]", "1", "", '{"a":}']),
    "regex": (r"(?i:yes|no)[.!]*", ["yes", "NO!.!"], ["maybe", "yes?", "y", "yesno"]),
    "choices": (
        ("fox", "foxes", 'a "b\\" [c]{2}', "漢字\n", "a|b"),
        ["fox", "foxes", 'a "b\\" [c]{2}', "漢字\n", "a|b"],
        ["foxe", "a", "b", "漢", "", "foxfox"],
    ),
    "lark": (
        'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/',
        ["7", "((42))"],
        ["((42)", "()", "4 2"],
    ),
}


@pytest.mark.parametrize("kind", GOOD)
def test_texts_that_meet_a_grammar_and_others(any_vocabulary, kind):
    source, good, bad = GOOD[kind]
    grammar = any_vocabulary.compiler.compile(kind, source)
    assert [text for text in good if not any_vocabulary.meets(grammar, text)] == []
    assert [text for text in bad if any_vocabulary.meets(grammar, text)] == []


def test_a_mask_is_what_the_bytes_of_the_tokens_say(any_vocabulary):
    """No control token, no token outside the BPE, no row without a token; and no bit beyond them."""
    grammar = any_vocabulary.compiler.compile("regex", "q[a-m ]+")
    matcher = grammar.matcher()
    matcher.accept(any_vocabulary.in_bytes("q"))

    def matching() -> set[int]:
        token_bytes = any_vocabulary.tokenizer.token_bytes
        return {i for i in any_vocabulary.text_ids if re.fullmatch(b"[a-m ]+", token_bytes(i))}

    (mask,) = matcher.masks(())
    assert len(mask) == -(-any_vocabulary.rows // 8)
    assert any_vocabulary.bits(mask) == matching()
    matcher.accept(any_vocabulary.in_bytes("a"))
    assert any_vocabulary.bits(matcher.masks(())[0]) == matching() | any_vocabulary.end_ids


def test_masks_behind_drafts_are_those_of_the_tokens_one_by_one(any_vocabulary):
    grammar = any_vocabulary.compiler.compile("json_schema", PERSON)
    randomness = random.Random(1)
    for _ in range(4):
        matcher, reply = grammar.matcher(), []
        while True:
            drafts = _walk(any_vocabulary, grammar, reply, randomness)
            masks = matcher.masks(drafts)
            for count, mask in enumerate(masks):
                alone = grammar.matcher()
                alone.accept(reply + drafts[:count])
                assert alone.masks(())[0] == mask
            assert len(masks) == len(drafts) + (drafts[-1] not in any_vocabulary.end_ids)
            kept = drafts[: randomness.randint(1, 4)]
            matcher.accept(kept)
            reply += kept
            if reply[-1] in any_vocabulary.end_ids:
                break
        person = json.loads(b"".join(map(any_vocabulary.tokenizer.token_bytes, reply[:-1])))
        assert set(person) <= {"name", "age", "tags"}
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 150
        assert set(person.get("tags", ())) <= {"a", "b"}


def _walk(vocabulary, grammar, reply: list[int], randomness: random.Random) -> list[int]:
    """Four tokens, or fewer up to an end id, chosen at random among those allowed."""
    matcher, drafts = grammar.matcher(), []
    matcher.accept(reply)
    while len(drafts) < 4 and not set(drafts[-1:]) & vocabulary.end_ids:
        allowed = sorted(vocabulary.bits(matcher.masks(())[0]))
        drafts.append(randomness.choice(allowed))
        matcher.accept(drafts[-1:])
    return drafts


def test_drafts_that_are_not_allowed_end_the_masks_and_change_nothing(demo):
    matcher = demo.compiler.compile("regex", "ab*").matcher()
    a, b, c = (demo.in_bytes(letter)[0] for letter in "abc")
    assert [len(matcher.masks(drafts)) for drafts in ((), (a, b), (a, c, b), (c, a), (a, b, c))] == [
        1, 3, 2, 1, 3,
    ]  # fmt: skip
    end = min(demo.end_ids)
    assert len(matcher.masks((a, end, b))) == 2
    assert len(matcher.masks((end,))) == 1
    matcher.accept((a, b, b, end))


def test_a_token_that_is_not_allowed_is_not_accepted(demo):
    matcher = demo.compiler.compile("regex", "ab*").matcher()
    a, c = (demo.in_bytes(letter)[0] for letter in "ac")
    with pytest.raises(ConstraintError, match=f"token {c} may not follow"):
        matcher.accept((a, c))


def test_where_the_grammar_leads_nowhere(demo):
    """It compiles, as the way into the dead end is open. Looking ahead at it does no harm."""
    matcher = demo.compiler.compile("lark", DEAD_END).matcher()
    (x,) = demo.in_bytes("x")
    for _ in range(2):
        first, behind = matcher.masks((x, x))
        assert demo.bits(first) == {x}
        assert demo.bits(behind) == set()
    matcher.accept((x,))
    with pytest.raises(ConstraintError, match="nothing may follow"):
        matcher.masks(())


def test_blanks_between_the_tokens_of_json_are_bounded(demo):
    grammar = demo.compiler.compile("json_schema", json.dumps({"type": "array"}))
    for between, allowed in {
        "": True, " ": True, "\n": True, "\n" + 16 * " ": True,
        "  ": False, "\n" + 17 * " ": False, "\n\n": False, "\t": False, "\r\n": False,
    }.items():  # fmt: skip
        assert demo.meets(grammar, f"[{between}1{between}]") is allowed
    assert not demo.meets(grammar, " []")
    assert not demo.meets(grammar, "[] ")
    own = {"type": "array", "x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}}
    assert not demo.meets(demo.compiler.compile("json_schema", json.dumps(own)), "[   ]")


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "EOF while parsing"),
        ("json_schema", "true", "Expecting object schema"),
        ("json_schema", '{"type": "strung"}', "Invalid type: strung"),
        ("json_schema", '{"not": {"type": "object"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "https://example.com/x.json"}', "does not fetch"),
        ("json_schema", '{"type": "string", "minLength": 2, "maxLength": 1}', "Unsatisfiable"),
        ("json_schema", "[" * 500, "recursion limit"),
        ("regex", "(ab", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", r"a(?=b)", "look-around"),
        ("regex", r"[^\x00-\x{10FFFF}]", "nothing may follow"),
        ("choices", (), "nothing to choose from"),
        ("choices", ("a", ""), "one of the texts is empty"),
        ("lark", 'begin: "a"', "no start rule"),
        ("lark", 'start: "a" other', 'unknown name: "other"'),
        ("lark", 'start: start "a"', "nothing may follow"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), "65537 bytes; at most 65536 are taken"),
        ("choices", ("é" * 20_000, "é" * 20_000), "80000 bytes; at most 65536 are taken"),
    ],
)
def test_what_cannot_be_compiled(demo, kind, source, message):
    with pytest.raises(GrammarError) as raised:
        demo.compiler.compile(kind, source)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 310
    assert "\n" not in str(raised.value)


def test_too_many_alternatives_are_refused_and_not_tried_for_ever(demo):
    either = [
        {"anyOf": [{"required": [f"{side}{n}"], "type": "object"} for side in "ab"]}
        for n in range(40)
    ]
    with pytest.raises(GrammarError, match="schema too large"):
        demo.compiler.compile("json_schema", json.dumps({"allOf": either}))


def test_without_end_ids_there_is_nothing_to_compile():
    with pytest.raises(GrammarError, match="no end id"):
        GrammarCompiler(DEMO / "tokenizer.json", 4096, ()).compile("regex", "a")


def test_a_vocabulary_with_more_tokens_than_rows_is_refused():
    with pytest.raises(ValueError, match="vocab size too small"):
        GrammarCompiler(DEMO / "tokenizer.json", 100, (1,))


def test_grammars_used_last_are_kept_and_matchers_are_apart(demo):
    compile_ = demo.compiler.compile
    grammar = compile_("regex", "a+")
    for n in range(CACHED_GRAMMARS - 1):
        compile_("regex", f"b{{{n + 1}}}")
        assert compile_("regex", "a+") is grammar
    assert compile_("choices", ("a+",)) is not grammar
    for n in range(CACHED_GRAMMARS):
        compile_("regex", f"c{{{n + 1}}}")
    assert compile_("regex", "a+") is not grammar
    one, other = grammar.matcher(), grammar.matcher()
    one.accept(demo.in_bytes("a"))
    assert demo.bits(one.masks(())[0]) >= demo.end_ids
    assert not demo.bits(other.masks(())[0]) & demo.end_ids


def test_threads_compile_at_once(demo):
    sources = [rf"[a-{'bcdefghi'[n % 8]}]{{1,{n // 8 + 1}}}z" for n in range(64)] * 2
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(lambda source: demo.compiler.compile("regex", source), sources))
    for grammar, source in zip(grammars, sources, strict=True):
        for text in ("az", "iz", "aaaz", "z", "a"):
            assert demo.meets(grammar, text) == bool(re.fullmatch(source, text))
