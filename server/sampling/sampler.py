"""From logits to tokens, for all rows of a step at once.

Order: grammar masks, penalties, logit_bias and min_tokens; temperature; top-k; top-p of what top-k left (Holtzman et
al., 2020); min-p relative to the likeliest (Nguyen et al., 2024); then one uniform number, keyed by (seed, position),
picks from the cumulative distribution. Rows that sort (top-k or top-p) accumulate from the likeliest token down, equal
ones by id; the others in the order of the vocabulary.

A row's token depends on its own logits and parameters only. Hence no reduction runs across rows, none may be split
between threads by the number of rows (softmax and cumsum work row by row, sum does not), and the number of candidates
looked at never changes a result: a row whose cut might fall among the candidates' last ties is redone with more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from server.protocol import TokenLogprobs
from server.sampling.fused import FusedSampler
from server.sampling.logprobs import read_scores, score_tokens, top_candidates
from server.sampling.random import uniforms
from server.sampling.row_state import SamplingRow
from server.transfer import upload

_WIDTHS = (128, 1024)
"""Candidates that a sorting row is tried with before its whole vocabulary is sorted."""


@dataclass(slots=True)
class Sampled:
    """token_ids, logprobs: one entry a row. failed: row index -> why; such a row's token means nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Chosen:
    """A step's tokens while the host may not know them yet.

    token_ids: i64[S] on the device, -1 where there was nothing to choose from. scores: of the asking rows, as
    score_tokens returns them, or empty. asking: row index -> top entries wanted. failed: row index -> why, as far as
    known.
    """

    token_ids: torch.Tensor
    scores: list[torch.Tensor]
    asking: dict[int, int]
    failed: dict[int, str]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that the host has to get."""
        return [self.token_ids, *self.scores]

    def read(self, tensors: Sequence[torch.Tensor]) -> Sampled:
        """tensors: those of `tensors`, on the host."""
        token_ids: list[int] = tensors[0].tolist()
        for i, token_id in enumerate(token_ids):
            if token_id < 0:
                self.failed.setdefault(i, "the model's logits are not finite, or no token is allowed")
                token_ids[i] = 0
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self.asking:
            for i, entry in zip(self.asking, read_scores(tensors[1:], list(self.asking.values())), strict=True):
                logprobs[i] = entry
        return Sampled(token_ids, logprobs, self.failed)


def choose(
    logits: torch.Tensor, rows: Sequence[SamplingRow], positions: Sequence[int], *, fused: FusedSampler | None = None
) -> Chosen:
    """logits: float32[S, V], changed in place. positions: of the tokens to be chosen in their sequences. fused: the
    backend's own sampler, which draws from the same distributions, maybe with other random numbers, and never waits for
    the device. Only a grammar needs to know the tokens before.
    """
    asking = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if asking:
        [index] = upload([np.fromiter(asking, np.int64, len(asking))], logits.device)
        raw = logits.index_select(0, index)
    failed = _adjust(logits, rows)
    if fused is None:
        token_ids = torch.tensor(_choose(logits, rows, positions, failed), device=logits.device)
    else:
        token_ids = fused(logits, rows, positions)
    scores: list[torch.Tensor] = []
    if asking:
        scores = score_tokens(raw, token_ids.clamp(min=0).index_select(0, index), max(asking.values()))
    return Chosen(token_ids, scores, asking, failed)


def _choose(
    logits: torch.Tensor, rows: Sequence[SamplingRow], positions: Sequence[int], failed: dict[int, str]
) -> list[int]:
    """Adds rows that have nothing to choose from to failed."""
    token_ids = _argmax(logits)
    drawing = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    best = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0]
    for i, value in enumerate(best.tolist()):
        if not math.isfinite(value):  # argmax finds a NaN before anything else
            failed.setdefault(i, "the model's logits are not finite" if value != -math.inf else "no token is allowed")
    drawing = [i for i in drawing if i not in failed]
    if drawing:
        subset = logits if len(drawing) == len(rows) else logits[drawing]
        drawn = _draw(subset, [rows[i] for i in drawing], [positions[i] for i in drawing])
        for i, token_id in zip(drawing, drawn, strict=True):
            token_ids[i] = token_id
    return token_ids


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, str]:
    """Applies what rows do to their own logits. Returns the rows whose grammar failed."""
    failed: dict[int, str] = {}
    vocab_size = logits.shape[1]
    for i, row in enumerate(rows):
        if row.grammar is not None:
            bitmask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
            try:
                row.grammar.fill_bitmask(bitmask)
            except Exception as error:  # one request's grammar must not end the others' step
                failed[i] = f"the grammar failed: {error}"
                continue
            apply_bitmask(logits[i], bitmask)
        if row.changes_logits:
            row.adjust(logits[i])
    return failed


def apply_bitmask(logits: torch.Tensor, bitmask: np.ndarray) -> None:
    """logits: float32[..., V], -inf in place where the bit of int32[..., ceil(V / 32)] is 0."""
    bits = np.unpackbits(bitmask.view(np.uint8), axis=-1, count=logits.shape[-1], bitorder="little")
    [banned] = upload([bits == 0], logits.device)
    logits.masked_fill_(banned, float("-inf"))


def _argmax(logits: torch.Tensor) -> list[int]:
    """Ties go to the lowest id."""
    if logits.device.type == "cpu":
        ids: list[int] = logits.numpy().argmax(axis=-1).tolist()  # several times as fast as torch's
        return ids
    return logits.argmax(dim=-1).tolist()


def _draw(logits: torch.Tensor, rows: list[SamplingRow], positions: list[int]) -> list[int]:
    """logits: float32[N, V], finite somewhere in each row; changed in place."""
    params = [row.params for row in rows]
    device = logits.device
    seeds = np.array([p.seed & (2**64 - 1) for p in params], dtype=np.uint64)
    numbers = torch.from_numpy(uniforms(seeds, np.array(positions, dtype=np.uint64))).to(device)
    table = torch.tensor([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params], dtype=torch.float64).to(device)
    if any(p.temperature != 1.0 for p in params):
        logits.div_(table[:, :1].float())

    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    sorting = torch.tensor([p.top_k > 0 or p.top_p < 1.0 for p in params])
    plain = torch.nonzero(~sorting)[:, 0].to(device)
    if len(plain):
        tokens[plain] = _draw_in_order(_rows(logits, plain), table[plain, 3], numbers[plain])
    left = torch.nonzero(sorting)[:, 0].to(device)
    peaks = torch.ones(len(rows), device=device)
    peaks[left] = _peaks(_rows(logits, left), table[left, 1])
    for width in (*_WIDTHS, logits.shape[1]):
        if len(left) == 0:
            break
        found, certain = _draw_sorted(_rows(logits, left), peaks[left], table[left, 1:], numbers[left], width)
        tokens[left[certain]] = found[certain]
        left = left[~certain]
    ids: list[int] = tokens.tolist()
    return ids


def _rows(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """logits[index], without a copy where that is all of them. index: ascending."""
    return logits if len(index) == len(logits) else logits[index]


def _draw_in_order(scores: torch.Tensor, min_p: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows without top-k and top-p. scores: float32[N, V]; min_p, numbers: float64[N]. Returns i64[N]."""
    probs = torch.softmax(scores, dim=-1)
    if bool((min_p > 0).any()):
        floor = (min_p * probs.amax(dim=-1)).float()[:, None]
        probs.masked_fill_(probs < floor, 0.0)
    cumulative = probs.cumsum_(dim=-1)
    return _invert(cumulative, cumulative[:, -1], numbers)


def _peaks(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """What the likeliest candidate's weight is, float32[N]: its probability, as top-p wants to know it.

    1 for rows with top-k: they are normalised by what top-k leaves, and spared the pass over the vocabulary.
    """
    peaks = torch.ones(len(scores), device=scores.device)
    nucleus = torch.nonzero(top_k == 0)[:, 0]
    if len(nucleus):
        peaks[nucleus] = torch.softmax(_rows(scores, nucleus), dim=-1).amax(dim=-1)
    return peaks


def _draw_sorted(
    scores: torch.Tensor, peaks: torch.Tensor, limits: torch.Tensor, numbers: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with top-k or top-p, from their `width` best candidates.

    scores: float32[N, V]. peaks: float32[N]. limits: float64[N, 3], top_k (0: off), top_p, min_p. numbers: float64[N].
    Returns (tokens i64[N], certain bool[N]): a row is certain if all that its limits keep, ties included, is among the
    candidates.
    """
    top_k, top_p, min_p = limits.unbind(1)
    vocab_size = scores.shape[1]
    values, ids = top_candidates(scores, width)
    width = ids.shape[1]
    weights = torch.exp(values - values[:, :1]) * peaks[:, None]  # [N, width], falling
    cumulative = weights.cumsum(dim=-1)
    max_kept = torch.where(top_k > 0, top_k, float(vocab_size)).clamp(max=width)  # float64[N]
    whole = torch.where(top_k > 0, cumulative.gather(1, max_kept.long()[:, None] - 1)[:, 0], 1.0)
    keep = cumulative - weights < (top_p * whole)[:, None]
    keep &= weights >= (min_p * weights[:, 0])[:, None]
    keep &= torch.arange(width, device=ids.device) < max_kept[:, None]
    last = (keep.sum(dim=-1) - 1).clamp(min=0)[:, None]  # what is kept is a prefix
    if width == vocab_size:
        certain = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    else:
        certain = (values.gather(1, last) > values[:, -1:])[:, 0]
    place = _invert(cumulative, cumulative.gather(1, last)[:, 0], numbers)
    return ids.gather(1, torch.minimum(place[:, None], last))[:, 0], certain


def _invert(cumulative: torch.Tensor, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first place in each row of float32[N, W] whose value exceeds number * total. Returns i64[N]."""
    below = torch.nextafter(total, torch.zeros_like(total))  # a product that rounds up to the total would find nothing
    targets = torch.minimum((numbers * total).float(), below)
    return torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
