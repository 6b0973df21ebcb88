"""Log-probabilities of the raw logits, that is before penalties, bias, temperature and masks."""

from collections.abc import Sequence

import torch

from server.protocol import TokenLogprobs

_MIN_WIDTH = 32


def score_tokens(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> list[torch.Tensor]:
    """logits: float32[N, V]. token_ids: i64[N], the token of each row. most: top entries that some row wants.

    Returns, on the device, the token_ids, their log-probabilities float32[N] and ranks i64[N], and the likeliest ids
    i64[N, most] with theirs float32[N, most]. Equal logits rank in the order of their ids, as far as the first few
    dozen.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])  # [N, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    if most == 0:
        nothing = logprobs[:, :0]
        return [token_ids, chosen[:, 0], ranks, nothing.long(), nothing]
    values, order = top_candidates(logprobs, max(most, _MIN_WIDTH))
    return [token_ids, chosen[:, 0], ranks, order[:, :most], values[:, :most]]


def read_scores(tensors: Sequence[torch.Tensor], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """tensors: what score_tokens returned, on the host. num_top: how many of the likeliest each row wants."""
    token_ids, chosen, ranks, top_ids, top_values = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprobs(token_ids[i], chosen[i], ranks[i], top_ids[i][:top], top_values[i][:top])
        for i, top in enumerate(num_top)
    ]


def top_candidates(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row of float32[N, V], largest first, equal ones in the order of their ids.

    Returns (values [N, width], ids i64[N, width]). Which of several equal to the last one are in is not defined.
    """
    if width >= scores.shape[1]:
        values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values, ids
    _, ids = torch.topk(scores, width, dim=-1, sorted=False)
    ids, _ = torch.sort(ids, dim=-1)
    values, order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
