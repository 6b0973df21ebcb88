"""Fields of OpenAI's, vLLM's and Anthropic's APIs that nothing here honors. Sent with a value that matters, they are
an error."""

from collections.abc import Mapping
from typing import Any

from server.errors import UnsupportedFeature

Harmless = Mapping[str, tuple[Any, ...]]
"""Field -> values that mean the same as leaving it out. null always does."""

EVERYWHERE: Harmless = {
    # OpenAI's
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
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

RESPONSES: Harmless = {
    **EVERYWHERE,
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "image": ({},),
}

MESSAGES: Harmless = {
    **EVERYWHERE,
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": ({}, {"edits": []}),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": ([], "default"),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}


def refuse_unsupported(fields: Mapping[str, Any], harmless: Harmless) -> None:
    for name in harmless.keys() & fields.keys():
        value = fields[name]
        if value is not None and value not in harmless[name]:
            raise UnsupportedFeature(f"{name} is not supported here", param=name)
