"""Whether a request can ever run.

The API refuses what can't at the door, with an error in its own words. Whatever still gets here must not wait for ever.
"""


def num_kv_tokens(num_prompt_tokens: int, max_tokens: int) -> int:
    """Most tokens whose keys and values a request has to hold: all but the last one that it samples."""
    return num_prompt_tokens + max(max_tokens - 1, 0)


def why_it_never_fits(
    num_prompt_tokens: int, max_tokens: int, *, max_model_len: int, num_blocks: int, block_size: int
) -> str | None:
    """A message with the numbers for a request that is too large even for an idle server; None where it fits.

    num_blocks: usable ones.
    """
    total = num_prompt_tokens + max_tokens
    asked = f"{num_prompt_tokens} in the prompt and {max_tokens} to generate"
    if num_prompt_tokens < 1:
        return "The prompt is empty: there is no token to start from."
    if total > max_model_len:
        return f"The context holds {max_model_len} tokens, but the request asks for {total}: {asked}."
    needed = -(-num_kv_tokens(num_prompt_tokens, max_tokens) // block_size)
    if needed > num_blocks:
        return (
            f"The KV cache holds {num_blocks * block_size} tokens in {num_blocks} blocks, but the request needs "
            f"{needed} blocks for {total} tokens: {asked}."
        )
    return None
