"""Token ids to text, one at a time, in whole characters.

The rules: the joined pieces equal decoding all ids at once; a character is never split; bytes that
cannot become one come as U+FFFD; a token costs the same however long the reply is.

`tokenizers.decoders.DecodeStream` is the kept library for this and was tried first. It holds tokens
back while their text ends in U+FFFD and decodes all of them again for the next one, so a run of
invalid bytes is never sent and costs quadratic time (2,000 such tokens of the Qwen vocabulary took
0.3 s, the next 4,000 2.9 s), and it cannot flush what it holds at the end. In byte-level BPE a
token is a string of bytes and nothing else, so the standard library's incremental decoder does
exactly the right thing. Property tests hold it to `tokenizers.Tokenizer.decode`.
"""

import codecs

from service.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one reply into text. Control tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts an empty reply."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Returns the characters that the token completes; the beginning of one is held back."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Ends the reply: U+FFFD when it ends inside a character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
