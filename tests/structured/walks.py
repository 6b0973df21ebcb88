"""Random outputs under a grammar's mask, as a model at an infinite temperature would write them."""

import random

import numpy as np

from server.structured import GrammarState
from server.tokenizer import Tokenizer
from tests.structured.conftest import PADDED_VOCABULARY

_CLOSERS = ['"', '",', '"}', "}", "]", '"]', ",", "0", "}}", "]}"]


def allowed_tokens(state: GrammarState) -> list[int]:
    row = np.full((PADDED_VOCABULARY + 31) // 32, -1, dtype=np.int32)
    state.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits).tolist()
    return tokens


def may_end(state: GrammarState, tokenizer: Tokenizer) -> bool:
    """Whether the output is complete as it is."""
    return not tokenizer.end_token_ids.isdisjoint(allowed_tokens(state))


def walk(state: GrammarState, tokenizer: Tokenizer, rng: random.Random, *, max_tokens: int = 400) -> list[int]:
    """Tokens up to and including an end token; ends strings, lists and objects with some preference.

    A walk of max_tokens is returned without its end.
    """
    closers = {id_ for text in _CLOSERS if (id_ := tokenizer.token_to_id(text)) is not None}
    output: list[int] = []
    while len(output) < max_tokens:
        allowed = allowed_tokens(state)
        ends = [id_ for id_ in allowed if id_ in tokenizer.end_token_ids]
        closing = [id_ for id_ in allowed if id_ in closers]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.4):
            token = ends[0]
        elif closing and rng.random() < 0.6:
            token = rng.choice(closing)
        else:
            token = rng.choice([id_ for id_ in allowed if id_ not in tokenizer.end_token_ids])
        state.advance([token])
        output.append(token)
        if token in tokenizer.end_token_ids:
            break
    return output
