"""What bytes a token stands for.

Two encodings of bytes as vocabulary strings are in use, and this module knows both:

- byte level (GPT-2, Llama 3, Qwen, SmolLM): every byte is one printable character, "Ġ" being the space;
- SentencePiece (Llama 2, Mistral, Gemma): "▁" is the space, and "<0xE3>" stands for one raw byte.

Text is decoded from bytes, never from strings of single tokens, so characters that span tokens come out whole.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from server.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class ByteCodec:
    """How a vocabulary writes bytes. byte_level: else SentencePiece.

    byte_fallback: "<0xE3>" is a byte. strips_first_space: a sequence's first space is an artefact of the encoding.
    """

    byte_level: bool
    byte_fallback: bool = False
    strips_first_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            table = _byte_level_table()
            try:
                return bytes([table[char] for char in token])
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()


def codec_of(decoder_json: bytes | None) -> ByteCodec:
    """Reads a `tokenizers` decoder's definition. Raises ModelLoadError for the kinds that no served family uses."""
    decoder = json.loads(decoder_json) if decoder_json else None
    parts = list(_flatten(decoder))
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return ByteCodec(byte_level=True)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(
            (part["type"] == "Strip" and part.get("content") == " " and part.get("start", 0) > 0)
            or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
            for part in parts
        )
        return ByteCodec(byte_level=False, byte_fallback="ByteFallback" in kinds, strips_first_space=strips)
    raise ModelLoadError(f"the tokenizer's decoder is neither byte level nor SentencePiece: {sorted(map(str, kinds))}")


def _flatten(decoder: Any) -> Iterator[dict[str, Any]]:
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for part in decoder.get("decoders", ()):
                yield from _flatten(part)
        else:
            yield decoder


@cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable Latin-1 stands for itself, U+0100 onwards for the other 68."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return table
