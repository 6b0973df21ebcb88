"""Fields of OpenAI's and vLLM's APIs that nothing here honors. Sent with a value that matters, they are an error."""

from collections.abc import Mapping
from typing import Any

from server.errors import UnsupportedFeature

_HARMLESS: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    # vLLM's
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
    "logprob_token_ids": (),
    "truncation_side": ("left",),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}
"""Field -> values that mean the same as leaving it out. null always does."""

NAMES = frozenset(_HARMLESS)


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name in NAMES & fields.keys():
        value = fields[name]
        if value is not None and value not in _HARMLESS[name]:
            raise UnsupportedFeature(f"{name} is not supported here", param=name)
