"""A compiled grammar, and how much memory it may have grown to."""

from dataclasses import dataclass

from llguidance import LLMatcher

from server.protocol import GrammarSpec

MAX_LEXER_STATES = 25_000
"""A string of 20,000 characters, counted by the grammar, takes fewer."""
_BYTES_A_STATE = 2_000
_BYTES_A_SOURCE_CHAR = 64
_BYTES_A_TOKEN = 100_000
"""What a token of an output adds at most, as measured with grammars made to that end. Most outputs add a hundredth."""


def reason_of(matcher: LLMatcher) -> str:
    """Why it has failed; "" where no output can go on from where it is."""
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    return "" if reason.startswith("NoExtension") else reason


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """Written by: the GrammarStates that follow it."""

    spec: GrammarSpec
    matcher: LLMatcher
    """At the start. Its lexer, which grows with what outputs visit, is shared with every copy."""
    num_tokens: int = 0
    """Of all outputs that have followed it."""

    @property
    def most_bytes(self) -> int:
        """Not less than it takes: the library doesn't tell."""
        lexer = min(self.num_tokens * _BYTES_A_TOKEN, MAX_LEXER_STATES * _BYTES_A_STATE)
        return len(self.spec.source) * _BYTES_A_SOURCE_CHAR + lexer
