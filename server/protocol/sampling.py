"""What a request asks of the sampler. Crosses the process border, so it holds plain values only."""

import msgspec

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32 long before it changes a token."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """A constraint on the output text.

    kind: "json_object", "json_schema", "regex", "choice" (source is a JSON list of strings) or "grammar" (Lark).
    source: the schema as JSON text, the pattern, the list, or the grammar. Empty for "json_object".
    """

    kind: str
    source: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose the next token, and when to stop. Written by: nobody after validation.

    The API process resolves everything that needs the tokenizer or a default: `seed` is always set (a random one where
    the client gave none, so that a resumed request continues as it would have), `stop_token_ids` already holds the
    model's end tokens unless the client said ignore_eos, `max_tokens` is already clamped to the context. Stop strings
    are not here: the API process matches them on text and aborts.
    """

    max_tokens: int
    seed: int
    """Unsigned 64-bit. Random numbers come from (seed, position of the token in the sequence)."""
    temperature: float = 1.0
    """Below GREEDY_TEMPERATURE: argmax; ties go to the lowest id."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as transformers does it."""
    presence_penalty: float = 0.0
    """Over output tokens only, as OpenAI documents it."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """stop_token_ids can't be sampled before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: off. k >= 0: the sampled token's log-probability and the k most likely ones."""
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE
