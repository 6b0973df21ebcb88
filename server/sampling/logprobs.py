"""Log-probabilities of the raw logits, that is before penalties, bias, temperature and masks."""

import torch

from server.protocol import TokenLogprobs

_MIN_WIDTH = 32


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """logits: float32[N, V]. token_ids: the token of each row. num_top: how many of the likeliest each row wants.

    Equal logits rank in the order of their ids, as far as the first few dozen.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    chosen = logprobs.gather(1, ids)  # [N, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    chosen_list, rank_list = chosen[:, 0].tolist(), ranks.tolist()
    most = max(num_top, default=0)
    if most == 0:
        return [TokenLogprobs(*row, [], []) for row in zip(token_ids, chosen_list, rank_list, strict=True)]
    values, order = top_candidates(logprobs, max(most, _MIN_WIDTH))
    top_values, top_ids = values[:, :most].tolist(), order[:, :most].tolist()
    return [
        TokenLogprobs(token_ids[i], chosen_list[i], rank_list[i], top_ids[i][:top], top_values[i][:top])
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
