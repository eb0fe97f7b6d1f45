"""What a reply must look like: JSON schemas, regular expressions, choices and Lark grammars.

llguidance compiles them and says which tokens may follow. It was taken over xgrammar because it needs
no torch, reads all of these kinds, and copies its state in microseconds, so that draft tokens are
followed on a copy and nothing is rolled back. A mask of 248,000 tokens takes it 0.02 ms at
the median, and up to 2 ms where a state is new.

Any tokens that spell an allowed text are allowed, but where there is just one way for the text to go on
only the tokenizer's own spelling of it. Control tokens, and all other tokens outside the BPE, are never
text; a Lark grammar may name them. The end ids are allowed exactly where the text so far is complete.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from service.engine.errors import ConstraintError
from service.engine.types import TokenMasks

GrammarKind = Literal["json_schema", "json_object", "regex", "choices", "lark"]
GrammarSource = str | tuple[str, ...]
"""A text; for "choices" the texts to choose from; for "json_object" anything."""

MAX_GRAMMAR_BYTES = 1 << 16
"""Bytes of UTF-8 of a source, all choices together."""
MAX_MESSAGE_CHARACTERS = 300
CACHED_GRAMMARS = 64
JSON_WHITESPACE = r" |\n {0,16}"
"""Between two tokens of JSON there is at most one of these: nothing else ends a weak model's habit of
writing blanks until its budget is used up. None before the first token and behind the last."""
MAX_LEXER_STATES = 20_000
"""Of one matcher, 1 to 2 kB each. Ordinary grammars need some hundreds."""


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that no text meets. The message is for clients."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. May be used by several threads at once."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, end_ids: Collection[int]) -> None:
        """Reads the tokenizer, which takes a second for 248,000 tokens.

        Args:
          tokenizer_json: the checkpoint's `tokenizer.json`, a byte-level BPE.
          vocab_size: ids that the model can choose; those that name no token are never allowed.
          end_ids: end ids of the checkpoint. Without any nothing can be compiled.

        Raises:
          ValueError: the tokenizer cannot be read, or has ids beyond `vocab_size`.
        """
        self._end_ids = frozenset(end_ids)
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._tokenizer = LLTokenizer(
            str(tokenizer_json), n_vocab=vocab_size, eos_token=sorted(end_ids) or None
        )
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[GrammarKind, GrammarSource], Grammar] = OrderedDict()

    def compile(self, kind: GrammarKind, source: GrammarSource) -> "Grammar":
        """Compiles a grammar, or finds it among those used last. Not for the event loop's thread.

        Args:
          kind: "json_schema" (JSON that the schema allows), "json_object" (any), "regex" (matches the
            whole reply), "choices" (one of these texts) or "lark" (from its rule `start`).
          source: at most `MAX_GRAMMAR_BYTES`.

        Raises:
          GrammarError: it is no such grammar, uses what is not supported (nothing is ignored), is too
            large, or allows nothing.
        """
        key = (kind, source)
        with self._lock:
            if (known := self._cached.get(key)) is not None:
                self._cached.move_to_end(key)
                return known
        matcher = self._matcher(kind, source)
        grammar = Grammar(matcher, self._end_ids, self._tokenizer.vocab_size)
        with self._lock:
            self._cached[key] = grammar
            if len(self._cached) > CACHED_GRAMMARS:
                self._cached.popitem(last=False)
        return grammar

    def _matcher(self, kind: GrammarKind, source: GrammarSource) -> LLMatcher:
        if not self._end_ids:
            raise GrammarError("the checkpoint has no end id, so no constrained reply could end")
        texts = (source,) if isinstance(source, str) else source
        size = sum(len(text.encode()) for text in texts)
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
        try:
            grammar = _translated(kind, texts)
        except ValueError as error:
            raise GrammarError(_told(str(error))) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_told(matcher.get_error()))
        try:
            # What it learns about the grammar now, its copies know.
            _mask(matcher, self._tokenizer.vocab_size)
        except ConstraintError as error:
            raise GrammarError(error.reason) from error
        return matcher


class Grammar:
    """A compiled grammar: implements `types.ConstraintFactory`."""

    def __init__(self, beginning: LLMatcher, end_ids: frozenset[int], vocab_size: int) -> None:
        """Made by `GrammarCompiler.compile`."""
        self._beginning = beginning
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def matcher(self) -> "GrammarMatcher":
        """Returns the grammar at the beginning of a reply."""
        return GrammarMatcher(self._beginning.deep_copy(), self._end_ids, self._vocab_size)


class GrammarMatcher:
    """A grammar and the reply so far: implements `types.TokenConstraint`."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], vocab_size: int) -> None:
        """Made by `Grammar.matcher`."""
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def masks(self, drafts: Sequence[int]) -> TokenMasks:
        """See `types.TokenConstraint.masks`. Where nothing may follow a draft, its mask is empty."""
        masks = [_mask(self._matcher, self._vocab_size)]
        if not drafts:
            return masks
        ahead = self._matcher.deep_copy()  # an error in it is none in the reply
        for draft in drafts:
            if draft in self._end_ids or not _allows(masks[-1], draft):
                break
            ahead.consume_token(draft)
            try:
                masks.append(_mask(ahead, self._vocab_size))
            except ConstraintError:
                masks.append(bytes(len(masks[0])))
                break
        return masks

    def accept(self, tokens: Sequence[int]) -> None:
        """See `types.TokenConstraint.accept`."""
        rest = tokens[self._matcher.try_consume_tokens(list(tokens)) :]
        # A matcher that nothing but an end id can follow has stopped, and takes not even that.
        ended = len(rest) == 1 and rest[0] in self._end_ids and self._matcher.is_accepting()
        if rest and not ended:
            raise ConstraintError(f"token {rest[0]} may not follow")


def _translated(kind: GrammarKind, texts: Sequence[str]) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(texts[0])
    if kind == "lark":
        return LLMatcher.grammar_from_lark(texts[0])
    if kind == "choices":
        if not texts or not all(texts):
            raise ValueError("there is nothing to choose from, or one of the texts is empty")
        return LLMatcher.grammar_from_regex("|".join(map(_literal, texts)))
    return LLMatcher.grammar_from_json_schema(
        '{"type": "object"}' if kind == "json_object" else texts[0],
        # Above what the schema itself may say under "x-guidance".
        overrides={
            "whitespace_flexible": True,
            "whitespace_pattern": JSON_WHITESPACE,
            "lenient": False,
            "coerce_one_of": False,
        },
    )


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
        for character in text
    )


def _mask(matcher: LLMatcher, vocab_size: int) -> bytes:
    """The tokens that may be next. Raises ConstraintError when there are none."""
    mask = matcher.compute_bitmask()[
        : -(-vocab_size // 8)
    ]  # it comes in words, and has one too many
    if matcher.is_error():  # in which case the mask is one for the end ids
        error = matcher.get_error()
        raise ConstraintError("nothing may follow" if "NoExtension" in error else _told(error))
    if mask.count(0) == len(mask):
        raise ConstraintError("nothing may follow")
    return mask


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def _told(error: str) -> str:
    """An error of llguidance in one line."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    if len(line) > MAX_MESSAGE_CHARACTERS:
        line = line[:MAX_MESSAGE_CHARACTERS] + "..."
    return line
