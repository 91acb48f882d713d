"""How log-probabilities show single tokens: as text where they are text, as bytes always."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte value, as byte-level tokenizers spell them: printable bytes of Latin-1 are
    themselves, the others follow from U+0100 in ascending order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(0x100 + rank): value for rank, value in enumerate(others)
    }


class TokenNames:
    """Text and bytes of single tokens.

    Args:
        tokenizer: None where the checkpoint has none; then a token is its number.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._alphabet: dict[str, int] = {}
        self._special: set[int] = set()
        if tokenizer is None:
            return
        self._special = set(tokenizer.get_added_tokens_decoder())
        decoder = tokenizer.decoder
        if decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__())):
            self._alphabet = _byte_level_alphabet()

    def raw(self, token_id: int) -> bytes | None:
        """The token's bytes; None if it has none."""
        piece = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        if token_id in self._special:
            return piece.encode()
        if self._alphabet:
            values = [self._alphabet.get(character) for character in piece]
            return piece.encode() if None in values else bytes(v for v in values if v is not None)
        if match := BYTE_TOKEN.match(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def name(self, token_id: int) -> str:
        """The token's text; ``bytes:\\x..`` where it is a part of a character only."""
        raw = self.raw(token_id)
        if raw is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)
