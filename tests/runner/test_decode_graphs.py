"""Decode steps from static buffers, with a capture that records nothing: what a graph would read must be right."""

import pytest
import torch

from server.runner.decode_graphs import Pass, bucket_sizes
from tests.models.checkpoints import make_model, save
from tests.runner.driver import NUM_ROWS, Driver, greedy, load, token_ids

PROMPTS = [list(range(3, 40)), [200, 5, 17] * 5, [9], [7, 7], [100] * 20]


@pytest.mark.parametrize("lengths", [(6, 6, 6), (2, 9, 5, 7, 3)])
def test_static_buffers_change_no_token(lengths: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Padding that is computed, a stale row of a larger batch, or buckets that see each other's buffers: requests end
    one by one, so batch sizes fall through the buckets."""
    model = load(save(make_model("llama"), tmp_path_factory.mktemp("llama")))
    replays: list[int] = []

    def capture(run: Pass) -> Pass:
        def replay() -> torch.Tensor:
            output = run()
            replays.append(len(output))
            return output

        return replay

    prompts, params = PROMPTS[: len(lengths)], [greedy(n) for n in lengths]
    expected = [token_ids(result) for result in Driver(model).generate(prompts, params)]
    driver = Driver(model, capture=capture)
    driver.runner.warm_up(16)
    assert [token_ids(result) for result in driver.generate(prompts, params)] == expected
    assert set(replays) <= set(bucket_sizes(NUM_ROWS))
    assert len(set(replays)) > 1 or len(set(lengths)) == 1
    assert len(replays) == max(lengths) - 1, "each step behind the prompts is one replay"


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (128, [1, 2, 4, *range(8, 65, 8), 96, 128]),
    ],
)
def test_buckets(max_num_seqs: int, sizes: list[int]) -> None:
    """A batch of max_num_seqs that no bucket holds, or a bucket beyond it."""
    assert bucket_sizes(max_num_seqs) == sizes
