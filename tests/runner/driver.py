"""Drives a ModelRunner as a scheduler would, with blocks scattered over the cache."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.backend import resolve
from server.models.decoder import Decoder
from server.models.registry import read_spec
from server.protocol import SamplingParams
from server.runner.kv_cache import allocate_kv_cache, kv_cache_spec
from server.runner.model_runner import ModelRunner
from server.scheduler.batch import AdmittedRow, SampledRow, SampledTokens, ScheduledBatch, ScheduledItem
from server.weights.load import load_model
from server.weights.locate import locate

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_ROWS = 8


def load(path: object, *, backend: str = "reference", dtype: torch.dtype = torch.float32, **options: object) -> Decoder:
    """Loads a checkpoint the way the engine does."""
    files = locate(str(path))
    return load_model(files, read_spec(files), resolve(backend, "cpu"), dtype=dtype, device=CPU, **options)


class Driver:
    """One runner with NUM_ROWS rows of `length` tokens each."""

    def __init__(self, model: Decoder, *, length: int = 256, **options: object) -> None:
        width = -(-length // BLOCK_SIZE)
        blocks = np.random.default_rng(5).permutation(NUM_ROWS * width) + 1
        self.page_table = blocks.reshape(NUM_ROWS, width).astype(np.int32)
        spec = kv_cache_spec(model.spec, block_size=BLOCK_SIZE, dtype=model.dtype)
        cache = allocate_kv_cache(model.ops, spec, num_blocks=NUM_ROWS * width, device=CPU)
        self.runner = ModelRunner(
            model=model, kv_cache=cache, page_table=self.page_table, max_num_seqs=NUM_ROWS, device=CPU, **options
        )
        self._next_step = 0

    def step(
        self,
        items: Sequence[ScheduledItem],
        admitted: Sequence[AdmittedRow] = (),
        released: Sequence[int] = (),
    ) -> SampledTokens:
        batch = ScheduledBatch(self._next_step, list(items), list(admitted), list(released))
        self._next_step += 1
        return self.runner.collect(self.runner.launch(batch))

    def launch(self, items: Sequence[ScheduledItem], admitted: Sequence[AdmittedRow] = ()) -> object:
        """The step's handle, to be collected later."""
        batch = ScheduledBatch(self._next_step, list(items), list(admitted), [])
        self._next_step += 1
        return self.runner.launch(batch)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        chunk: int = 1000,
        outputs: Sequence[Sequence[int]] | None = None,
    ) -> list[list[SampledRow]]:
        """Runs all prompts side by side until each has its max_tokens, prefilling at most `chunk` tokens a step each.

        outputs: tokens that were produced before, as after a preemption. Returns each one's results.
        """
        admitted = [
            AdmittedRow(f"r{row}", row, p, list(prompt), list(outputs[row] if outputs else ()))
            for row, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        tokens = [[*entry.prompt_token_ids, *entry.output_token_ids] for entry in admitted]
        lengths = [len(prompt) + p.max_tokens for prompt, p in zip(prompts, params, strict=True)]
        computed = [0] * len(tokens)
        results: list[list[SampledRow]] = [[] for _ in tokens]
        while any(len(known) < length for known, length in zip(tokens, lengths, strict=True)):
            items = [
                ScheduledItem(f"r{row}", row, start, known[start : start + chunk], start + chunk >= len(known))
                for row, (start, known) in enumerate(zip(computed, tokens, strict=True))
                if len(known) < lengths[row]
            ]
            sampled = self.step(items, admitted)
            assert not sampled.failed
            admitted = []
            for item in items:
                computed[item.row] = item.end
            for entry in sampled.rows:
                row = int(entry.request_id[1:])
                tokens[row] += entry.token_ids
                results[row].append(entry)
        return results


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **options)


def token_ids(results: Sequence[SampledRow]) -> list[int]:
    return [token_id for row in results for token_id in row.token_ids]
