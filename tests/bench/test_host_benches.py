import pytest

from server.bench import cli, kv_cache, kv_costs


@pytest.mark.parametrize(("block_size", "low", "high"), [(1, 0.0, 0.0), (16, 0.01, 0.04), (256, 0.1, 0.5)])
def test_waste_is_what_arithmetic_says(block_size, low, high):
    """A figure of the README that comes from a wrong formula: half a block a request is what paging may lose."""
    assert low <= kv_cache.wasted_share(block_size, num_requests=2_000) <= high


def test_eviction_bench_really_evicts():
    """The eviction figure measures plain allocation because nothing was cached, or the chains repeat."""
    chains = {hash_ for seed in range(8) for hash_ in kv_costs.chain(seed)}
    assert len(chains) == 8 * kv_costs.BLOCKS_PER_ROW
    assert kv_costs.allocate_and_evict(2 * kv_costs.BLOCKS_PER_ROW) > 0


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["nonsense"], 2), (["--help"], 0)])
def test_the_door_lists_the_benchmarks(argv, code, capsys):
    """`pageturner bench` alone ends in a traceback."""
    assert cli.main(argv) == code
    captured = capsys.readouterr()
    assert all(name in captured.out + captured.err for name in ("serve", "kernels", "kv-cache"))


def test_the_door_opens(capsys):
    """A name in the list that leads to no module."""
    for name in cli.BENCHMARKS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
    assert "pageturner bench kv-cache" in capsys.readouterr().out
