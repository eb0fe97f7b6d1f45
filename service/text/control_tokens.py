"""Keeps a client's text from becoming control tokens of a prompt.

A chat is rendered by a template that knows nothing of tokens, and then tokenised, so what a client
writes could close its turn and open another. Here the client's strings are marked before rendering:
the outer characters of everything that could become the spelling of a control token are replaced by
lone surrogates, which no client can send (UTF-8 cannot carry them). After rendering, a spelling that
has no mark at either end is the template's own and becomes the token; any other is text, restored
and tokenised as text. It takes two characters to be marked, or one at the end of a string, so a
spelling cannot be put together from two strings, or from a string and the template, either. (A
template that deletes characters inside a client's string could still join one; we know of none.)

A mark stands for one character, so a template that trims, splits or measures text sees no
difference, unless it looks for control tokens in it.
"""

import re
from collections.abc import Collection, Sequence

from service.text.chat_template import ChatTemplateError
from service.text.tokenizer import Tokenizer

FIRST_MARK = 0xDC00
MAX_MARKS = 0x3FF
SURROGATE = re.compile("[\ud800-\udfff]")


class Marking:
    """Marks for the spellings of a tokenizer's control tokens and of its markup tokens.

    Markup tokens have text of their own, as <think> has, but shape a prompt like control tokens.
    """

    def __init__(self, control: Collection[str], markup: Collection[str]) -> None:
        """Chooses a mark for each first and each last character of a spelling."""
        self.spellings = frozenset(control) | frozenset(markup)
        outer = sorted({end for spelling in self.spellings for end in (spelling[0], spelling[-1])})
        if len(outer) > MAX_MARKS:
            raise ValueError(f"{len(outer)} characters to mark, at most {MAX_MARKS}")
        self._mark_of = {character: chr(FIRST_MARK + n) for n, character in enumerate(outer)}
        self._unmarked = {ord(mark): character for character, mark in self._mark_of.items()}
        self._control_suspects = _suspects(control)
        self._suspects = _suspects(self.spellings)
        self._control_spelled = _spelled(control)
        self._spelled = _spelled(self.spellings)

    def mark_control(self, text: str) -> str:
        """Marks what could become a control token in a client's string; its length stays the same.

        The string must have no surrogates: see `checked`.
        """
        return self._mark(text, self._control_suspects)

    def mark_all(self, text: str) -> str:
        """Like `mark_control`, for markup tokens, too."""
        return self._mark(text, self._suspects)

    def restore(self, marked: str) -> str:
        """Puts the original characters back."""
        return marked.translate(self._unmarked)

    def split(self, marked: str) -> tuple[list[str], list[str]]:
        """Returns the template's own tokens, and the restored text before, between and behind."""
        tokens = self._spelled.findall(marked)
        return tokens, [self.restore(piece) for piece in self._spelled.split(marked)]

    def last_turn(self, marked: str) -> str:
        """Returns the text behind the last control token that is the template's own."""
        return self.restore(self._control_spelled.split(marked)[-1])

    def _mark(self, text: str, suspects: re.Pattern[str]) -> str:
        return suspects.sub(lambda match: self._mark_of[match[0]], text)


class MarkedEncoder:
    """Tokenises marked text."""

    def __init__(self, tokenizer: Tokenizer, marking: Marking) -> None:
        """Takes the tokenizer whose tokens the marking is about."""
        self._marking = marking
        self._tokenizer = tokenizer
        self._as_text = tokenizer.reading_as_text(marking.spellings)
        self._ids = {spelling: tokenizer.added_tokens[spelling] for spelling in marking.spellings}
        self._control = frozenset(self._ids.values())

    def encode(self, marked: str) -> tuple[int, ...]:
        """Returns token ids among which only the template's own control tokens are some.

        They are those of the whole text in one go, unless a client has spelled a control token.

        Raises:
          ChatTemplateError: the tokenizer makes a control token of what is none as written.
        """
        tokens, pieces = self._marking.split(marked)
        own_ids = [self._ids[token] for token in tokens]
        (token_ids,) = self._tokenizer.encode_batch([self._marking.restore(marked)])
        if self._control_ids(token_ids) == own_ids:
            return token_ids
        # The tokenizer, too, cuts at added tokens before anything else: no merge crosses them.
        encoded = self._as_text.encode_batch(pieces)
        token_ids = encoded[0]
        for token_id, piece_ids in zip(own_ids, encoded[1:], strict=True):
            token_ids += (token_id, *piece_ids)
        if self._control_ids(token_ids) != own_ids:
            raise ChatTemplateError("a text becomes a control token even when read as plain text")
        return token_ids

    def _control_ids(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in self._control]


def checked(text: str) -> str:
    """Returns the same string.

    Raises:
      ChatTemplateError: it holds a lone surrogate (JSON can spell one), so it is no text.
    """
    if SURROGATE.search(text):
        raise ChatTemplateError("a text holds a lone surrogate, which is not a character")
    return text


def _suspects(spellings: Collection[str]) -> re.Pattern[str]:
    """Finds the characters that might be the first or the last of a spelling."""
    patterns: set[str] = set()
    for spelling in spellings:
        first, last = re.escape(spelling[0]), re.escape(spelling[-1])
        if len(spelling) == 1:
            patterns.add(first)
        else:
            second, last_but_one = re.escape(spelling[1]), re.escape(spelling[-2])
            patterns.add(rf"{first}(?={second}|\Z)")
            patterns.add(rf"(?:(?<={last_but_one})|\A){last}")
    return re.compile("|".join(sorted(patterns)) or "(?!)")


def _spelled(spellings: Collection[str]) -> re.Pattern[str]:
    """Finds spellings, the longest first, as the tokenizer does."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
