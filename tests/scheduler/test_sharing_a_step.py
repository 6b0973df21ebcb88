"""Who gets how much of a step: chunks, fairness, order, preemption, prefixes."""

import pytest

from server.config import SchedulerConfig
from server.errors import ConfigError
from server.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import Simulation, expected_tokens, request


def _shares(simulation: Simulation) -> dict[str, int]:
    return {item.request_id: len(item.token_ids) for item in simulation.step().items}


def test_a_long_prompt_is_computed_in_chunks_and_samples_at_its_end_only() -> None:
    """Catches a chunk that is sampled, a budget that is exceeded, and tokens that are skipped."""
    simulation = Simulation(max_num_batched_tokens=16)
    new = request("a", range(40), max_tokens=2)
    simulation.add(new)
    batches = [simulation.step() for _ in range(4)]
    assert [[(i.start, len(i.token_ids), i.samples) for i in batch.items] for batch in batches] == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
        [(40, 1, True)],
    ]
    assert simulation.answers["a"].token_ids == expected_tokens(new)


def test_a_decode_never_waits_for_a_prefill() -> None:
    """Catches an older long prompt that takes the whole budget from a younger decode."""
    simulation = Simulation(max_num_batched_tokens=16, max_model_len=512, num_blocks=256)
    simulation.add(request("long", range(400), max_tokens=1))
    simulation.step()
    simulation.add(request("short", [9, 9, 9], max_tokens=20))
    while simulation.answers["short"].finish_reason is None:
        shares = _shares(simulation)
        assert shares["short"] in (1, 3)
        assert shares["long"] == 16 - shares["short"], "the long prompt must get all that is left"


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    """Catches a prefill that starves those behind it, and the opposite: budget that stays unused."""
    simulation = Simulation(max_num_batched_tokens=32, max_model_len=1024, num_blocks=512)
    simulation.add(request("long", range(500), max_tokens=1))
    assert _shares(simulation) == {"long": 32}
    simulation.add(*(request(f"short{i}", [i] * 6, max_tokens=1) for i in range(2)))
    assert _shares(simulation) == {"long": 24, "short0": 6, "short1": 2}
    assert _shares(simulation) == {"long": 28, "short1": 4}


def test_first_come_first_served() -> None:
    """Catches a younger request that overtakes an older one in the queue."""
    simulation = Simulation(max_num_seqs=2)
    simulation.add(*(request(f"r{i}", [i, i], max_tokens=2) for i in range(6)))
    served = []
    while simulation.scheduler.has_work:
        served += [row.request_id for row in simulation.step().admitted]
    assert served == [f"r{i}" for i in range(6)]


def test_lower_priority_numbers_run_first_and_ties_by_arrival() -> None:
    """Catches a priority that is ignored, reversed, or honoured under fcfs."""
    for policy, order in (("priority", ["d", "b", "a", "c"]), ("fcfs", ["a", "b", "c", "d"])):
        simulation = Simulation(max_num_seqs=1, policy=policy)
        priorities = {"a": 2, "b": 1, "c": 2, "d": 0}
        simulation.add(*(request(name, [1, 2], max_tokens=2, priority=p) for name, p in priorities.items()))
        served = []
        while simulation.scheduler.has_work:
            served += [row.request_id for row in simulation.step().admitted]
        assert served == order


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "c"), ("priority", "b")])
def test_the_last_in_order_is_preempted_and_computed_again(policy: str, victim: str) -> None:
    """Catches a preemption of the wrong request, a token sampled twice, and a recompute that is not counted."""
    simulation = Simulation(num_blocks=12, block_size=4, policy=policy, enable_prefix_cache=False)
    requests = [
        request(name, [i] * 14, max_tokens=8, priority=priority)
        for i, (name, priority) in enumerate({"a": 0, "b": 5, "c": 1}.items())
    ]
    simulation.add(*requests)
    preempted = set()
    while simulation.scheduler.has_work:
        simulation.step()
        preempted |= {r["request_id"] for r in simulation.scheduler.inspect()["requests"] if r["num_preemptions"]}
    assert preempted == {victim}
    assert simulation.num_preemptions == 1
    assert simulation.recomputed_tokens > 14
    for new in requests:
        assert simulation.answers[new.request_id].token_ids == expected_tokens(new)


@pytest.mark.parametrize(("admission", "fewest", "most"), [("now", 15, 99), ("forecast", 0, 0)])
def test_answers_that_need_what_they_may_preempt_nobody(admission: str, fewest: int, most: int) -> None:
    """Catches admission by what is free now: all are let in, and lose what they computed when the first ones grow."""
    simulation = Simulation(num_blocks=60, block_size=4, max_num_seqs=16, admission=admission)
    simulation.add(*(request(f"r{i}", [i] * 8, max_tokens=40, seed=i) for i in range(40)))
    simulation.run()
    assert fewest <= simulation.num_preemptions <= most


def test_no_place_is_kept_for_what_nobody_writes() -> None:
    """Catches a server that takes few requests at a time because each may write much, though none does."""
    simulation = Simulation(num_blocks=60, block_size=4, max_num_seqs=16, admission="forecast")
    simulation.add(*(request(f"r{i}", [i] * 8, max_tokens=200, stop_token_ids=(3, 7), seed=i) for i in range(40)))
    running = []
    while simulation.scheduler.has_work:
        simulation.step()
        running.append(sum(r["status"] == "running" for r in simulation.scheduler.inspect()["requests"]))
    assert running[0] == 1
    assert max(running) > 5


def test_no_place_is_kept_for_all_that_a_request_without_a_limit_may_write() -> None:
    """Catches a server whose first clients come in one by one because they name no max_tokens, or whose later ones do
    because others used all of a small one."""
    simulation = Simulation(
        num_blocks=512,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        admission="forecast",
    )
    simulation.add(*(request(f"r{i}", [i] * 8, max_tokens=8000, seed=i) for i in range(40)))
    assert len(simulation.step().items) > 25
    simulation.abort(*(f"r{i}" for i in range(40)))
    simulation.add(*(request(f"small{i}", [i] * 8, max_tokens=20, seed=i) for i in range(20)))
    simulation.run()
    simulation.add(*(request(f"later{i}", [i] * 8, max_tokens=8000, seed=i) for i in range(40)))
    assert len(simulation.step().items) > 25


def test_answers_that_are_cut_from_outside_keep_no_place_either() -> None:
    """Catches a server that goes on taking few requests at a time because a stop string ends all of them, or their
    clients hang up: to the engine that is an abort."""
    simulation = Simulation(num_blocks=60, block_size=4, max_num_seqs=16, admission="forecast")
    simulation.add(*(request(f"r{i}", [i] * 8, max_tokens=200, seed=i) for i in range(40)))
    most = 0
    while simulation.scheduler.has_work:
        simulation.step()
        entries = simulation.scheduler.inspect()["requests"]
        most = max(most, sum(r["status"] == "running" for r in entries))
        simulation.abort(*(r["request_id"] for r in entries if r["num_output_tokens"] >= 5))
    assert most > 5


def test_what_a_preempted_request_had_is_hit_again() -> None:
    """Catches a preemption that throws its blocks' names away: recomputing would cost the whole prompt."""
    simulation = Simulation(num_blocks=16, block_size=4)
    simulation.add(request("a", [1] * 30, max_tokens=24), request("b", [2] * 25, max_tokens=20))
    simulation.run()
    assert simulation.num_preemptions == 1
    assert simulation.recomputed_tokens < 25


def test_the_watermark_keeps_blocks_for_the_running_and_never_stops_the_only_request() -> None:
    """Catches admission that leaves nothing to grow into, and a watermark that locks everyone out."""
    simulation = Simulation(num_blocks=20, block_size=4, watermark=0.5, max_model_len=80)
    simulation.add(request("whole", range(76), max_tokens=4))
    simulation.run()
    simulation.add(request("a", [1] * 20, max_tokens=8), request("b", [2] * 24, max_tokens=2))
    simulation.step()
    assert simulation.describe("b")["status"] == "waiting"
    simulation.run()
    assert simulation.num_preemptions == 0


def test_admission_counts_what_running_prefills_still_need() -> None:
    """Catches two long prompts that are both let in and then preempt each other half-way."""
    simulation = Simulation(num_blocks=30, block_size=4, max_num_batched_tokens=16)
    simulation.add(request("a", [1] * 80, max_tokens=30), request("b", [2] * 80, max_tokens=2))
    simulation.run()
    assert simulation.num_preemptions == 0


@pytest.mark.parametrize(("length", "cached"), [(15, 12), (16, 12), (17, 16), (18, 16)])
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(length: int, cached: int) -> None:
    """Catches a full hit that leaves no token whose logits could be sampled, at a block's edge."""
    simulation = Simulation(block_size=4)
    first, second = (request(name, range(length), max_tokens=3) for name in ("first", "second"))
    simulation.add(first)
    simulation.run()
    simulation.add(second)
    batch = simulation.step()
    assert (batch.items[0].start, len(batch.items[0].token_ids)) == (cached, length - cached)
    simulation.run()
    assert simulation.answers["first"].deltas[0].num_cached_tokens == 0
    assert simulation.answers["second"].deltas[0].num_cached_tokens == cached
    assert simulation.answers["second"].token_ids == expected_tokens(second)


def test_salts_share_nothing() -> None:
    """Catches a tenant who can tell from the timing what another one asked."""
    simulation = Simulation()
    simulation.add(request("a", range(20), max_tokens=1, cache_salt="a"))
    simulation.run()
    simulation.add(request("b", range(20), max_tokens=1, cache_salt="b"))
    simulation.run()
    assert simulation.answers["b"].deltas[0].num_cached_tokens == 0


def test_after_a_reset_nothing_is_hit() -> None:
    """Catches a reset of the prefix cache that running requests undo with old blocks."""
    simulation = Simulation()
    simulation.add(request("a", range(20), max_tokens=4))
    simulation.step()
    simulation.scheduler.reset_prefix_cache()
    simulation.run()
    simulation.add(request("b", range(20), max_tokens=1))
    simulation.run()
    assert simulation.answers["b"].deltas[0].num_cached_tokens == 0


def test_a_prefix_in_the_making_is_waited_for_without_blocking_others() -> None:
    """Catches a burst of equal prompts that each compute the same, and a wait that holds up the whole queue."""
    simulation = Simulation(max_num_batched_tokens=24, max_num_seqs=4, num_blocks=128)
    simulation.add(request("first", range(40), max_tokens=1))
    simulation.add(request("same", [*range(40), 7], max_tokens=1))
    simulation.add(request("other", [9] * 5, max_tokens=1))
    assert _shares(simulation) == {"first": 19, "other": 5}
    assert _shares(simulation) == {"first": 21}
    assert _shares(simulation) == {"same": 1}
    assert simulation.answers["same"].deltas[0].num_cached_tokens == 40


def test_who_waits_for_a_prefix_keeps_its_claim_on_a_row() -> None:
    """Catches a stream of others that take each row that comes free, and a search of the whole queue in every step."""
    simulation = Simulation(max_num_batched_tokens=24, max_num_seqs=2, num_blocks=128)
    simulation.add(request("first", range(40), max_tokens=5), request("same", range(40), max_tokens=1))
    simulation.add(request("other", [9] * 5, max_tokens=1))
    assert _shares(simulation) == {"first": 24}
    assert _shares(simulation) == {"first": 16}
    assert _shares(simulation) == {"first": 1, "same": 4}


def test_a_second_computation_of_a_prefix_does_not_end_the_wait_for_the_first() -> None:
    """Catches an entry that is removed by a request that it does not belong to."""
    simulation = Simulation(max_num_batched_tokens=24, num_blocks=128)
    simulation.add(request("first", range(80), max_tokens=1))
    simulation.add(request("scored", range(80), max_tokens=1, prompt_logprobs=0))
    simulation.add(request("same", range(80), max_tokens=1))
    simulation.step()
    assert simulation.describe("scored")["status"] == "running"
    simulation.abort("scored")
    simulation.step()
    assert simulation.describe("same")["status"] == "waiting"
    simulation.run()
    assert simulation.answers["same"].deltas[0].num_cached_tokens == 76


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_nobody_waits_for_a_prefix_that_is_not_coming(how: str) -> None:
    """Catches a request that waits for a block of one that was aborted or preempted on the way there."""
    simulation = Simulation(num_blocks=19, block_size=4, max_num_batched_tokens=16, max_num_seqs=3)
    if how == "preempt":
        simulation.add(request("old", [5] * 15, max_tokens=40))
        simulation.step()
    simulation.add(request("first", range(60), max_tokens=1))
    simulation.step()
    simulation.add(request("same", range(60), max_tokens=1))
    simulation.step()
    assert simulation.describe("same")["status"] == "waiting"
    if how == "abort":
        simulation.abort("first")
        assert _shares(simulation) == {"same": 16}
    simulation.run()
    assert simulation.num_preemptions == (1 if how == "preempt" else 0)
    assert simulation.answers["same"].token_ids == expected_tokens(request("same", range(60), max_tokens=1))


def test_prompts_wait_for_streams_but_not_for_each_other() -> None:
    """Catches a long prompt that makes streams wait for a whole budget, or chunks cut short when nobody waits."""
    simulation = Simulation(num_blocks=200, max_num_batched_tokens=64, max_num_prefill_tokens=10)
    simulation.add(request("stream", range(40), max_tokens=5))
    assert _shares(simulation) == {"stream": 40}
    simulation.add(request("long", range(100, 135), max_tokens=2))
    assert [_shares(simulation) for _ in range(4)] == [
        {"stream": 1, "long": 10},
        {"stream": 1, "long": 10},
        {"stream": 1, "long": 10},
        {"stream": 1, "long": 5},
    ]


def test_the_more_streams_wait_the_more_prompt_tokens_join_them() -> None:
    """A full batch, whose step is long anyway, that reads prompts as slowly as a single stream's short step must."""
    simulation = Simulation(
        num_blocks=200, max_num_batched_tokens=64, max_num_prefill_tokens=4, prefill_tokens_per_stream=3
    )
    simulation.add(*(request(f"stream{i}", [i] * 4, max_tokens=9) for i in range(3)))
    simulation.step()
    simulation.add(request("long", range(100, 140), max_tokens=1))
    assert _shares(simulation)["long"] == 4 + 3 * 3


def test_a_suspect_runs_alone_until_it_has_a_token() -> None:
    """Catches company for a request that may bring the engine down, and suspicion that outlives its first token: fifty
    acquitted requests that run one after the other."""
    simulation = Simulation()
    simulation.add(request("a", [1] * 5, max_tokens=3))
    simulation.add(request("suspect", [2] * 5, max_tokens=3, run_alone=True))
    simulation.add(request("b", [3] * 5, max_tokens=3))
    steps = []
    while simulation.scheduler.has_work:
        steps.append(sorted(_shares(simulation)))
    assert steps == [["a"], ["suspect"], ["a", "b", "suspect"], ["a", "b", "suspect"], ["b"]]


def test_a_token_that_ends_its_request_is_not_run() -> None:
    """With lookahead, a place in a step, and blocks that others have to give up, for an answer that is complete."""
    simulation = Simulation(lookahead=1)
    simulation.add(request("a", range(5), max_tokens=2))
    assert [len(simulation.step().items) for _ in range(3)] == [1, 1, 0]


def test_no_other_step_is_under_way_beside_that_of_a_suspect() -> None:
    """With lookahead, a suspect blamed for the death of an engine that still computes its neighbors' step, or neighbors
    blamed that are launched behind it."""
    simulation = Simulation(lookahead=1)
    simulation.add(request("a", [1] * 5, max_tokens=6))
    simulation.step()
    simulation.add(request("suspect", [2] * 5, max_tokens=3, run_alone=True), request("b", [3] * 5, max_tokens=3))
    on_the_device = []
    for aborted in ([], [], ["suspect"], []):
        simulation.abort(*aborted)
        before = [batch for batch, _ in simulation._under_way]
        launched = simulation.step()
        on_the_device.append({item.request_id for batch in (*before, launched) for item in batch.items})
    assert on_the_device == [{"a"}, {"suspect"}, {"suspect"}, {"a", "b"}]


def test_the_first_delta_carries_what_is_known_at_the_start() -> None:
    """Catches a first delta without cached tokens and the time of the first step, or later ones with them."""
    simulation = Simulation()
    simulation.add(request("a", range(10), max_tokens=3))
    simulation.run()
    deltas = simulation.answers["a"].deltas
    assert [delta.num_cached_tokens for delta in deltas] == [0, None, None]
    assert [delta.scheduled_time for delta in deltas] == [1.0, None, None]


def test_statistics_and_inspection_tell_the_same() -> None:
    """Catches a gauge or a page map that has nothing to do with what runs."""
    simulation = Simulation(max_num_seqs=2, num_blocks=20, block_size=4)
    simulation.add(*(request(name, range(9), max_tokens=3, cache_salt=name) for name in "abc"))
    batch = simulation.scheduler.schedule(1.0)
    output = simulation.scheduler.update(batch, simulation.runner.run(batch), 1.0)
    stats = output.stats
    assert (stats.num_running, stats.step_num_tokens) == (2, 18)
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_free) == (6, 0, 14)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 0)
    inspection = simulation.scheduler.inspect()
    assert inspection["pages"] == {"num_blocks": 20, "block_size": 4, "used": 6, "cached": 0, "free": 14}
    assert [(r["request_id"], r["status"], len(r["blocks"])) for r in inspection["requests"]] == [
        ("a", "running", 3),
        ("b", "running", 3),
        ("c", "waiting", 0),
    ]
    assert inspection["requests"][0]["num_computed_tokens"] == 9
    assert inspection["requests"][0]["num_output_tokens"] == 1
    batch = simulation.scheduler.schedule(2.0)
    output = simulation.scheduler.update(batch, simulation.runner.run(batch), 2.0)
    assert output.stats.prefix_cache_queries == 0, "told twice"


def test_a_step_must_have_room_for_a_token_of_each_running_request() -> None:
    """Catches a configuration under which decodes would starve."""
    simulation = Simulation()
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(16\) must be at least max_num_seqs \(17\)"):
        Scheduler(
            config=SchedulerConfig(max_num_seqs=17, max_num_batched_tokens=16),
            manager=simulation.manager,
            max_model_len=64,
        )
