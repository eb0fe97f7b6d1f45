"""Where reasoning ends and the answer begins.

A reply begins inside reasoning if the prompt ends there, or if the first thing in it is <think>:
so a model that reasons although it was told not to is heard, and no tag shows. Reasoning ends at
the first </think>; a block that follows directly opens it again, and a second </think> there is
dropped. Any other <think> or </think> is text. Newlines next to the tags are layout, not text.

A tool call inside reasoning is a draft and stays text. Only when the reply ends with calls and the
reasoning was never closed, they are the reply: the model forgot </think>, as it sometimes does.
"""

import enum

from service.text.tags import END_THINK, END_TOOL_CALL, FUNCTION, THINK, TOOL_CALL, Piece


class _State(enum.Enum):
    EDGE = enum.auto()
    """Nothing but white space since the beginning or the last tag."""
    REASONING = enum.auto()
    CONTENT = enum.auto()


class _CallDraft:
    """Holds back calls inside reasoning until something else follows them."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._last_tag = ""
        """Of the format of calls; what is between <function= and </tool_call> is not looked at."""

    @property
    def is_complete(self) -> bool:
        """Whether the reasoning ends with whole calls."""
        return self._last_tag == END_TOOL_CALL

    def feed(self, piece: Piece) -> str:
        """Returns what is certain to be reasoning."""
        tag = piece.text if piece.is_tag else ""
        match self._last_tag:
            case "":
                follows = tag == TOOL_CALL
            case "<tool_call>":
                follows = tag == FUNCTION or piece.is_blank
            case "<function=":
                follows = True
                tag = tag if tag == END_TOOL_CALL else ""
            case _:
                follows = tag == TOOL_CALL or piece.is_blank
        if not follows:
            released = self.release()
            return released + (self.feed(piece) if released else piece.text)
        self._last_tag = tag or self._last_tag
        self._pieces.append(piece)
        return ""

    def take(self) -> list[Piece]:
        """Returns the calls."""
        pieces, self._pieces, self._last_tag = self._pieces, [], ""
        return pieces

    def release(self) -> str:
        """Returns the calls as text."""
        return "".join(piece.text for piece in self.take())


class ReasoningSplitter:
    """Divides the pieces of one reply into reasoning and the rest."""

    def __init__(self, *, reasoning_open: bool, hold_calls: bool) -> None:
        """Starts a reply; with `hold_calls`, calls at the end of open reasoning are looked for."""
        self._reasoning = reasoning_open
        self._state = _State.EDGE
        self._after_tag = reasoning_open
        self._held = ""
        self._draft = _CallDraft() if hold_calls else None

    @property
    def is_over(self) -> bool:
        """Whether all that follows belongs to the answer, as it is."""
        return self._state is _State.CONTENT

    def feed(self, piece: Piece) -> tuple[str, list[Piece]]:
        """Returns the reasoning and the pieces of the answer that are certain now."""
        if self._state is _State.CONTENT:
            return "", [piece]
        if self._state is _State.EDGE:
            return self._at_edge(piece)
        if piece.text == END_THINK and piece.is_tag:
            reasoning = self._reason(self._release_draft())
            self._to_edge(reasoning=False)
            return reasoning, []
        if self._draft is not None:
            return self._reason(self._draft.feed(piece)), []
        return self._reason(piece.text), []

    def finish(self, *, truncated: bool) -> tuple[str, list[Piece]]:
        """Ends the reply: returns what was held back."""
        if self._state is _State.REASONING:
            if self._draft is not None and self._draft.is_complete and not truncated:
                return "", self._draft.take()
            reasoning = self._reason(self._release_draft()) + self._held
            self._held = ""
            return reasoning, []
        held, self._held = self._held, ""
        if self._state is _State.EDGE and held and not self._after_tag:
            return "", [Piece(held)]
        return "", []

    def _at_edge(self, piece: Piece) -> tuple[str, list[Piece]]:
        if piece.is_blank:
            self._held += piece.text
            return "", []
        if piece.is_tag and piece.text == THINK:
            self._to_edge(reasoning=True)
            return "", []
        if piece.is_tag and piece.text == END_THINK:
            self._to_edge(reasoning=False)
            return "", []
        self._state = _State.REASONING if self._reasoning else _State.CONTENT
        text, self._held = self._held + ("" if piece.is_tag else piece.text), ""
        if self._after_tag:
            text = text.lstrip("\n")
        pieces = [Piece(text)] if text else []
        if piece.is_tag:
            pieces.append(piece)
        if self._reasoning:
            return "".join(self.feed(each)[0] for each in pieces), []
        return "", pieces

    def _to_edge(self, *, reasoning: bool) -> None:
        self._state, self._reasoning, self._after_tag = _State.EDGE, reasoning, True
        self._held = ""

    def _reason(self, text: str) -> str:
        """Returns reasoning but for the newlines at its end, which may turn out to be layout."""
        text = self._held + text
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        return shown

    def _release_draft(self) -> str:
        return "" if self._draft is None else self._draft.release()


def reasoning_is_open(turn: str) -> bool:
    """Says whether the beginning of an assistant's turn, as a prompt has it, ends in reasoning."""
    return turn.rfind(THINK) > turn.rfind(END_THINK)
