"""The checkpoint's tokenizer: text to token ids, token ids to text and to exact bytes."""

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

TOKENIZER_FILE = "tokenizer.json"


def byte_alphabet() -> dict[str, int]:
    """Returns the character that byte-level BPE writes for each byte, as character -> byte.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for the characters from
    U+0100 on. The table is a constant of the format (GPT-2's), not of a checkpoint.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = byte_alphabet()


class Tokenizer:
    """Byte-level BPE as described by a `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wraps a loaded tokenizer.

        Raises:
          ValueError: it is not byte-level, so tokens have no bytes of their own.
        """
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ValueError(
                f"the tokenizer's decoder is {backend.decoder!r}; only ByteLevel is supported"
            )
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def from_directory(cls, checkpoint: Path) -> "Tokenizer":
        """Loads `tokenizer.json` of a checkpoint directory."""
        path = checkpoint / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return cls(tokenizers.Tokenizer.from_file(str(path)))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that names a token; the model may have more rows."""
        return 1 + max(self._backend.get_vocab().values())

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text; control tokens written in it are parsed as such."""
        # The batch form, because it releases the GIL (`encode` does not: 2 MB of text would stop
        # the event loop for a second), and the fast one, because nobody needs offsets.
        return tuple(self._backend.encode_batch_fast([text])[0].ids)

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Like `encode` for several texts, each without the tokens that begin or end a prompt."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]

    async def encode_in_thread(self, text: str) -> tuple[int, ...]:
        """Like `encode`, without holding up the event loop."""
        return await asyncio.to_thread(self.encode, text)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Spelling -> id of the tokens outside the BPE: control tokens, and some that have text."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    def reading_as_text(self, spellings: Collection[str]) -> "Tokenizer":
        """Returns the same tokenizer, except that it reads some added tokens as plain text.

        Both share one vocabulary, so this costs neither time nor memory.
        """
        backend = tokenizers.Tokenizer(self._backend.model)
        backend.normalizer = self._backend.normalizer
        backend.pre_tokenizer = self._backend.pre_tokenizer
        backend.decoder = self._backend.decoder
        # The flag has effect on special tokens only; in the order of ids they keep their ids.
        backend.encode_special_tokens = True
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            token.special = token.content in spellings
            backend.add_tokens([token])  # pyright: ignore[reportUnknownMemberType]
        return Tokenizer(backend)

    def decode(self, token_ids: Sequence[int], *, include_special: bool = False) -> str:
        """Returns the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=not include_special)

    def __contains__(self, token_id: object) -> bool:
        """Says whether an id names a token (a model may have more rows than there are tokens)."""
        return isinstance(token_id, int) and self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Says whether an id is a control token, which has no text in a reply."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the exact bytes that a token stands for; none for an id that names no token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        spelled = [BYTE_OF_CHARACTER.get(character) for character in token]
        # An added token may hold characters outside the byte alphabet (a space): it is plain text.
        return (
            token.encode()
            if None in spelled
            else bytes(byte for byte in spelled if byte is not None)
        )
