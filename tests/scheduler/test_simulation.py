"""Thousands of random workloads against the undisturbed answer."""

import random

import pytest

from server.protocol import FinishReason, GenerateRequest, GrammarSpec
from tests.scheduler.simulation import Simulation, expected_tokens, request

NUM_WORKLOADS = 1600
PARTS = 8


def _random_requests(rng: random.Random, simulation: Simulation) -> list[GenerateRequest]:
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(2)]
    longest = simulation.longest_request
    requests = []
    for number in range(rng.randrange(1, 13)):
        shared = rng.choice(prefixes) if rng.random() < 0.6 else []
        prompt = (shared + [rng.randrange(50) for _ in range(rng.randrange(1, 30))])[: longest - 1]
        max_tokens = rng.randrange(0, min(30, longest - len(prompt)) + 1)
        new = request(
            f"r{number}",
            prompt,
            max_tokens=max_tokens,
            seed=rng.randrange(1000),
            stop_token_ids=(3, 4) if rng.random() < 0.4 else (),
            min_tokens=rng.choice([0, 0, 5]),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            priority=rng.randrange(3),
            cache_salt=rng.choice(["", "", "tenant"]),
            run_alone=rng.random() < 0.05,
            grammar=GrammarSpec("regex", "a*") if rng.random() < 0.05 else None,
        )
        if rng.random() < 0.15:
            new = _resume(new, rng)
        requests.append(new)
    return requests


def _resume(new: GenerateRequest, rng: random.Random) -> GenerateRequest:
    """The same request as a new engine gets it after a crash, some tokens on."""
    output = expected_tokens(new)
    done = output[: rng.randrange(len(output))] if output else []
    return GenerateRequest(
        new.request_id,
        new.prompt_token_ids,
        new.sampling,
        new.arrival_time,
        resumed_token_ids=done,
        priority=new.priority,
        cache_salt=new.cache_salt,
        run_alone=new.run_alone,
    )


def _random_simulation(rng: random.Random, lookahead: int, admission: str) -> Simulation:
    block_size = rng.choice([1, 2, 4, 4, 8, 16])
    max_num_seqs = rng.choice([1, 2, 4, 8, 16])
    return Simulation(
        num_blocks=rng.randrange(2, 2 + rng.choice([60, 160]) // block_size),
        block_size=block_size,
        max_model_len=rng.choice([32, 64, 128]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16 + rng.choice([0, 0, 1, 7, 40]),
        max_num_prefill_tokens=rng.choice([None, None, 1, 5]),
        policy=rng.choice(["fcfs", "priority"]),
        watermark=rng.choice([0.0, 0.01, 0.2]),
        enable_prefix_cache=rng.random() < 0.7,
        lookahead=lookahead,
        admission=admission,
    )


def _check_order_of_service(simulation: Simulation) -> None:
    """Runs a step. Whoever is first in order must be in it, and so must all that need one token, unless preempted."""
    before = {r["request_id"]: r for r in simulation.scheduler.inspect()["requests"] if r["status"] == "running"}
    batch = simulation.scheduler.schedule(simulation.now)
    after = simulation.scheduler.inspect()["requests"]
    served = {item.request_id for item in batch.items}
    running = {r["request_id"] for r in after if r["status"] == "running"}
    suspects = {r["request_id"] for r in after if r["run_alone"] and r["status"] == "running"}
    if served & suspects:
        assert len(served) == 1, "a suspect had company"
    else:
        assert not after or after[0]["request_id"] in served, "the first in order was passed over"
        for request_id, r in before.items():
            num_left = r["num_prompt_tokens"] + r["num_output_tokens"] - r["num_computed_tokens"]
            assert request_id not in running or num_left != 1 or request_id in served, "a decode waited for a prefill"
    if batch:
        simulation.receive(simulation.scheduler.update(batch, simulation.runner.run(batch), simulation.now))
    simulation.scheduler.check_invariants()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_workloads_give_the_undisturbed_answers(part: int, lookahead: int) -> None:
    """Catches starvation, deadlock, double ends, leaks, wrong block mappings, and any answer that memory pressure,
    chunking, prefix sharing, priorities, preemption, aborts of others, a resumption, or a step that is scheduled while
    the one before is under way changes."""
    preemptions = hits = resumed = aborted = awaited = 0
    for number in range(part, NUM_WORKLOADS, PARTS):
        rng = random.Random(number)
        simulation = _random_simulation(rng, lookahead, "forecast" if number % 3 == 0 else "now")
        requests = _random_requests(rng, simulation)
        arriving = sorted((rng.randrange(20) if rng.random() < 0.5 else 0, r.request_id, r) for r in requests)
        victims = {r.request_id for r in requests if rng.random() < 0.1}
        for tick in range(3000):
            simulation.now = float(tick)
            while arriving and arriving[0][0] <= tick:
                simulation.add(arriving.pop(0)[2])
            if victims and tick and rng.random() < 0.1:
                simulation.abort(victims.pop())
            if not arriving and not simulation.has_work:
                break
            simulation.step() if lookahead else _check_order_of_service(simulation)
        simulation.run()
        _check_answers(simulation, requests, context=f"workload {number}")
        preemptions += simulation.num_preemptions
        hits += simulation.hit_tokens
        resumed += sum(bool(r.resumed_token_ids) for r in requests)
        aborted += sum(a.finish_reason is FinishReason.ABORT for a in simulation.answers.values())
        awaited += simulation.runner.num_awaited
    happened = {"preemptions": preemptions, "hits": hits, "resumed": resumed, "aborted": aborted}
    assert min(happened.values()) > 10, f"the workloads were too tame: {happened}"
    assert (awaited > 1000) == (lookahead > 0)


def _check_answers(simulation: Simulation, requests: list[GenerateRequest], *, context: str) -> None:
    for new in requests:
        answer = simulation.answers[new.request_id]
        expected = expected_tokens(new)[len(new.resumed_token_ids) :]
        assert answer.finish_reason is not None, f"{context}: {new.request_id} never ended"
        if answer.finish_reason is FinishReason.ABORT:
            assert answer.token_ids == expected[: len(answer.token_ids)], context
        else:
            assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), f"{context}: {answer.error}"
            assert answer.token_ids == expected, f"{context}: {new.request_id} got another answer"
        sent = [delta for delta in answer.deltas if delta.prompt_logprobs is not None]
        wanted = new.sampling.prompt_logprobs is not None and not new.resumed_token_ids
        if answer.finish_reason is not FinishReason.ABORT:
            assert len(sent) == (1 if wanted else 0), f"{context}: prompt_logprobs sent {len(sent)} times"
    usage = simulation.manager.usage()
    assert usage.used == 0, f"{context}: {usage.used} blocks leaked"
