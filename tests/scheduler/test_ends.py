"""How requests end: each exactly once, with the right reason."""

import pytest

from server.protocol import FinishReason
from server.scheduler.batch import SampledRow, SampledTokens
from tests.scheduler.simulation import Simulation, expected_tokens, request


def _answer_with(simulation: Simulation, tokens: list[int], *, failed: dict[str, str] | None = None) -> None:
    """A step in which the model says these tokens, one a sampling item, instead of its own."""
    batch = simulation.scheduler.schedule(simulation.now)
    sampling = [item for item in batch.items if item.samples and item.request_id not in (failed or {})]
    rows = [SampledRow(item.request_id, [token]) for item, token in zip(sampling, tokens, strict=True)]
    output = simulation.scheduler.update(batch, SampledTokens(batch.step_id, rows, failed or {}), simulation.now)
    simulation.receive(output)


@pytest.mark.parametrize(
    ("fields", "says", "reason"),
    [
        ({"max_tokens": 3}, [5, 6, 7], FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": (7,)}, [5, 6, 7], FinishReason.STOP),
        ({"max_tokens": 3, "stop_token_ids": (7,)}, [5, 6, 7], FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (7,), "min_tokens": 2}, [7, 7, 7], FinishReason.STOP),
        ({"max_tokens": 3, "stop_token_ids": (7,), "min_tokens": 3}, [7, 7, 7], FinishReason.LENGTH),
        ({"max_tokens": 9, "resumed_token_ids": [1, 2, 3, 4, 5, 6]}, [5, 6, 7], FinishReason.LENGTH),
        ({"max_tokens": 9, "min_tokens": 5, "stop_token_ids": (7,), "resumed_token_ids": [7, 1, 2]}, [7, 7, 7], "stop"),
    ],
)
def test_stop_tokens_and_limits(fields: dict, says: list[int], reason: FinishReason) -> None:
    """Catches a limit that is off by one, a stop token before min_tokens, and resumed tokens that don't count."""
    simulation = Simulation()
    simulation.add(request("a", [1, 2, 3], **fields))
    for token in says:
        assert simulation.answers["a"].finish_reason is None
        _answer_with(simulation, [token])
    answer = simulation.answers["a"]
    assert answer.finish_reason == reason
    assert answer.token_ids == says
    assert answer.deltas[-1].stop_token_id == (says[-1] if reason == FinishReason.STOP else None)
    assert not simulation.scheduler.has_work
    assert simulation.manager.usage().used == 0


def test_a_request_may_fill_the_context_to_its_end() -> None:
    """Catches a limit that is off by one: positions and the page table's row hold exactly max_model_len tokens."""
    simulation = Simulation(max_model_len=8, block_size=4)
    new = request("a", [1, 2, 3], max_tokens=5)
    simulation.add(new)
    simulation.run()
    assert simulation.answers["a"].finish_reason is FinishReason.LENGTH
    assert simulation.answers["a"].token_ids == expected_tokens(new)


def test_scoring_computes_the_whole_prompt_and_samples_nothing() -> None:
    """Catches max_tokens=0 that hangs, emits a token, or reads prompt tokens from the cache whose logprobs are due."""
    simulation = Simulation(max_num_batched_tokens=16)
    simulation.add(request("warm", range(40), max_tokens=1))
    simulation.run()
    simulation.add(request("score", range(40), max_tokens=0, prompt_logprobs=1))
    before = simulation.runner.num_computed_tokens
    simulation.run()
    answer = simulation.answers["score"]
    assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.LENGTH)
    assert simulation.runner.num_computed_tokens - before == 40
    assert [len(delta.prompt_logprobs) for delta in answer.deltas] == [40]
    assert answer.deltas[0].num_cached_tokens == 0


def test_prompt_logprobs_go_out_once() -> None:
    """Catches prompt_logprobs that come again with a recomputed or resumed prompt."""
    simulation = Simulation()
    simulation.add(request("a", range(10), max_tokens=5, prompt_logprobs=0))
    simulation.add(request("b", range(10), max_tokens=5, prompt_logprobs=0, resumed_token_ids=[3, 4]))
    simulation.run()
    sent = {name: [d.prompt_logprobs is not None for d in answer.deltas] for name, answer in simulation.answers.items()}
    assert sent == {"a": [True, False, False, False, False], "b": [False, False, False]}


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (0, 5, "empty"),
        (60, 5, "context holds 64 tokens, but the request asks for 65: 60 in the prompt and 5 to generate"),
        (40, 2, "holds 40 tokens in 10 blocks, but the request needs 11 blocks for 42 tokens: 40 in the prompt and 2"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(prompt_len: int, max_tokens: int, message: str) -> None:
    """Catches a request that waits for ever for blocks that don't exist, and takes the queue with it."""
    simulation = Simulation(num_blocks=10, block_size=4, max_model_len=64)
    simulation.add(request("large", range(prompt_len), max_tokens=max_tokens))
    assert not simulation.scheduler.has_work
    simulation.add(request("next", range(40), max_tokens=1))  # needs all 10 blocks: the last token's KV is never stored
    simulation.run()
    assert simulation.answers["large"].finish_reason is FinishReason.ERROR
    assert message in simulation.answers["large"].error
    assert simulation.answers["next"].finish_reason is FinishReason.LENGTH


def test_a_resumed_request_that_was_done_ends_at_once() -> None:
    """Catches a crash between a request's last token and its end: one token too many would be sampled."""
    simulation = Simulation()
    simulation.add(request("length", [1, 2], max_tokens=3, resumed_token_ids=[5, 6, 7]))
    simulation.add(request("stop", [1, 2], max_tokens=9, stop_token_ids=(7,), resumed_token_ids=[5, 7]))
    assert not simulation.scheduler.has_work
    simulation.run()
    assert simulation.answers["length"].finish_reason is FinishReason.LENGTH
    assert simulation.answers["stop"].finish_reason is FinishReason.STOP
    assert simulation.answers["stop"].token_ids == []


def test_deadlines_pass_while_waiting_and_while_running() -> None:
    """Catches a deadline that is only looked at in the queue, or only once."""
    simulation = Simulation(max_num_seqs=1)
    simulation.add(request("running", [1, 2, 3], max_tokens=50, deadline=5.0))
    simulation.add(request("waiting", [1, 2, 3], max_tokens=50, deadline=3.0))
    simulation.add(request("patient", [1, 2, 3], max_tokens=3, deadline=100.0))
    simulation.run()
    reasons = {name: answer.finish_reason for name, answer in simulation.answers.items()}
    timeout, length = FinishReason.TIMEOUT, FinishReason.LENGTH
    assert reasons == {"running": timeout, "waiting": timeout, "patient": length}
    assert len(simulation.answers["running"].token_ids) == 4
    assert simulation.answers["waiting"].deltas[0].scheduled_time is None


def test_an_abort_frees_the_blocks_before_the_next_step() -> None:
    """Catches a client that left and still holds memory; and an abort during a step that brings update() down."""
    simulation = Simulation(num_blocks=8, block_size=4)
    simulation.add(request("a", range(12)), request("b", range(50, 60)), request("c", range(20, 24), max_tokens=2))
    simulation.step()
    batch = simulation.scheduler.schedule(simulation.now)
    sampled = simulation.runner.run(batch)
    simulation.abort("a", "c", "unknown")
    used = simulation.manager.usage().used
    simulation.receive(simulation.scheduler.update(batch, sampled, simulation.now))
    assert used == simulation.manager.usage().used == 3
    assert [len(simulation.answers[name].token_ids) for name in "abc"] == [1, 2, 1]
    simulation.run()
    reasons = [simulation.answers[name].finish_reason for name in "abc"]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT]


def test_an_id_that_is_in_use_is_an_error() -> None:
    """Catches two requests whose deltas can't be told apart."""
    simulation = Simulation()
    simulation.add(request("a", [1]))
    with pytest.raises(ValueError, match="in use"):
        simulation.add(request("a", [2]))
    simulation.run()
    simulation.add(request("a", [2]))
    simulation.run()


def test_one_request_may_fail_in_a_step_that_served_the_others() -> None:
    """Catches a request that the runner refused and that is nevertheless kept, or that takes others with it."""
    simulation = Simulation()
    simulation.add(request("a", [1, 2], max_tokens=1), request("b", [3, 4], max_tokens=1))
    _answer_with(simulation, [9], failed={"a": "not a valid grammar"})
    assert simulation.answers["a"].error == "not a valid grammar"
    assert simulation.answers["b"].token_ids == [9]
    simulation.scheduler.check_invariants()


def test_several_tokens_a_step_are_cut_at_the_end() -> None:
    """Catches tokens behind the stop token: speculation hands over several at once."""
    simulation = Simulation()
    simulation.add(request("a", [1, 2], max_tokens=9, stop_token_ids=(7,)))
    batch = simulation.scheduler.schedule(0.0)
    output = simulation.scheduler.update(batch, SampledTokens(1, [SampledRow("a", [5, 7, 8])], {}), 0.0)
    assert output.deltas[0].token_ids == [5, 7]
    assert output.deltas[0].stop_token_id == 7


def test_ends_outside_a_step_are_told_once() -> None:
    """Catches an end that is lost, or told by both take_finished() and the next update()."""
    simulation = Simulation()
    scheduler = simulation.scheduler
    assert scheduler.take_finished(0.0) is None
    simulation.add(request("a", [1, 2]), request("b", [1, 2]))
    simulation.abort("a")
    output = scheduler.take_finished(0.0)
    assert output.step_id == -1
    assert [delta.request_id for delta in output.deltas] == ["a"]
    assert scheduler.take_finished(0.0) is None
    simulation.receive(output)
    simulation.run()
    assert simulation.answers["b"].finish_reason is FinishReason.LENGTH
