"""Published claims about paged memory, continuous batching and prefix caches, each against our own scheduler."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.paper import reservation, simulation
from benchmarks.paper.simulation import CostModel, Job, Trace, chat_jobs, random_prompt
from paging import extend_hashes

SLOTS = 15_700
"""KV slots of the paper's OPT-13B on an A100 with 40 GB (its table 1)."""
CONTEXT = 2048
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """theirs: as published. ours: measured here. target: what we ask of ourselves, or empty. holds: it is met."""

    claim: str
    source: str
    theirs: str
    ours: str
    target: str
    holds: bool
    value: float


KWON = "Kwon et al. 2023 (PagedAttention)"
YU = "Yu et al. 2022 (Orca)"
ZHENG = "Zheng et al. 2024 (RadixAttention)"


def share_gpt(num: int = 600) -> list[Job]:
    """Mean lengths of the paper's ShareGPT workload: 161 tokens in, 338 out."""
    return chat_jobs(num, mean_input=161, mean_output=338, seed=0, longest=CONTEXT)


def paged(jobs: list[Job], *, num_blocks: int = SLOTS // BLOCK_SIZE, block_size: int = BLOCK_SIZE) -> Trace:
    return simulation.run(jobs, num_blocks=num_blocks, block_size=block_size)


def reserved(jobs: list[Job], reserve: reservation.Reserve) -> Trace:
    return reservation.run(jobs, reserve, num_slots=SLOTS, max_num_seqs=256, cost=CostModel())


def memory_waste() -> Verdict:
    waste = paged(share_gpt()).waste
    others = [
        reserved(share_gpt(), reserve).waste
        for reserve in (reservation.reserve_exact, reservation.reserve_pow2(CONTEXT), reservation.reserve_max(CONTEXT))
    ]
    return Verdict(
        "share of the KV memory that holds nothing", KWON, "3.7 % paged; 62, 73, 80 % reserved (exact, 2^n, longest)",
        f"{waste:.1%} paged; {others[0]:.0%}, {others[1]:.0%}, {others[2]:.0%}", "< 4 %", waste < 0.04, waste,
    )  # fmt: skip


def more_running(reserve: reservation.Reserve, against: str, theirs: str, target: float) -> Verdict:
    ratio = paged(share_gpt()).mean_running / reserved(share_gpt(), reserve).mean_running
    return Verdict(
        f"running requests at equal memory, against {against}", KWON, theirs, f"{ratio:.2f} x",
        f">= {target:g} x", ratio >= target, ratio,
    )  # fmt: skip


def block_size_curve() -> Verdict:
    """Tokens a second, memory-bound; what a kernel loses on tiny blocks is not in it."""
    rates = {size: paged(share_gpt(300), num_blocks=SLOTS // size, block_size=size).tokens_per_second for size in SIZES}
    share = rates[16] / max(rates.values())
    curve = ", ".join(f"{size}: {rate / max(rates.values()):.3f}" for size, rate in rates.items())
    return Verdict(
        "throughput at block size 16, of the best size's", KWON, "16 is the default; larger ones waste memory",
        curve, ">= 0.98", share >= 0.98, share,
    )  # fmt: skip


SIZES = (1, 4, 16, 64, 256)


def parallel_sampling(n: int) -> Verdict:
    """n samples of one prompt: full prompt blocks are shared, the rest is each sample's own."""
    source = random.Random(n)
    prompt, num_output = random_prompt(source, 200), 56
    samples = [Job(f"s{i}", prompt, num_output) for i in range(n)]
    lone = -(-(len(prompt) + num_output - 1) // BLOCK_SIZE)
    shared = len(prompt) // BLOCK_SIZE
    expected = n * lone - (n - 1) * shared
    peak = simulation.run(samples, num_blocks=1000, prefix_cache=True).peak_blocks
    return Verdict(
        f"blocks for {n} samples of a 200-token prompt", KWON, "6.1 to 9.8 % saved on Alpaca's short prompts",
        f"{peak} (alone {n * lone}; {1 - peak / (n * lone):.0%} saved)", f"{expected}, by arithmetic",
        peak == expected, peak,
    )  # fmt: skip


def continuous_batching() -> Verdict:
    """Batches that wait for their longest answer against requests that come and go at every step; ample memory."""
    source, width = random.Random(1), 64
    jobs = [Job(f"r{i}", random_prompt(source, 128), source.randint(100, 1024)) for i in range(1024)]
    free = simulation.run(jobs, num_blocks=width * (-(-1152 // BLOCK_SIZE)), max_num_seqs=width)
    static = reservation.static_batches(jobs, width=width, cost=CostModel())
    ratio = free.saturated_tokens / free.saturated / static.tokens_per_second
    longest = [max(job.num_output for job in jobs[i : i + width]) for i in range(0, len(jobs), width)]
    bound = width * sum(longest) / sum(job.num_output for job in jobs)
    return Verdict(
        "tokens a second, continuous against static batching, answers of 100 to 1,024 tokens", YU,
        "up to 36.9 x FasterTransformer (175B, pipelined)", f"{ratio:.2f} x",
        f">= 95 % of the bound, {bound:.2f} x", ratio >= 0.95 * bound, ratio,
    )  # fmt: skip


def conversations(num_chats: int, num_requests: int, seed: int) -> list[Job]:
    """Chats whose every turn repeats what was said before, under one system prompt; some are livelier than others."""
    source = random.Random(seed)
    said = [random_prompt(source, 256)] * num_chats
    liveliness = [1 / (1 + chat) for chat in range(num_chats)]
    jobs: list[Job] = []
    for i in range(num_requests):
        [chat] = source.choices(range(num_chats), liveliness)
        said[chat] = said[chat] + random_prompt(source, source.randint(20, 120))
        job = Job(f"c{chat}.{i}", said[chat], 64, arrival=i * 1000.0)
        said[chat] = said[chat] + [simulation.token_at(job.request_id, len(job.prompt) + k) for k in range(64)]
        jobs.append(job)
    return jobs


def unlimited_cache(jobs: list[Job]) -> tuple[int, int]:
    """(tokens that a cache which forgets nothing finds, blocks that it then holds).

    The last token of an answer is never fed back, so its key and value exist only if something follows.
    """
    seen: set[bytes] = set()
    hits = 0
    for job in jobs:
        answer = [simulation.token_at(job.request_id, len(job.prompt) + i) for i in range(job.num_output - 1)]
        names: list[bytes] = []
        extend_hashes(names, job.prompt + answer, block_size=BLOCK_SIZE)
        usable = names[: (len(job.prompt) - 1) // BLOCK_SIZE]
        hits += BLOCK_SIZE * next((i for i, name in enumerate(usable) if name not in seen), len(usable))
        seen.update(names)
    return hits, len(seen)


def hit_rate(share: float) -> Verdict:
    """share: memory, of what the cached content would need in the end."""
    jobs = conversations(24, 200, seed=3)
    best, num_distinct = unlimited_cache(jobs)
    # one request runs at a time; its own blocks come on top
    num_blocks = round(num_distinct * share) + max(-(-job.num_tokens // BLOCK_SIZE) for job in jobs)
    trace = simulation.run(jobs, num_blocks=num_blocks, prefix_cache=True)
    ratio = trace.cache_hits / best
    where = "without eviction" if share >= 1 else f"in {share:.0%} of the memory"
    return Verdict(
        f"prefix-cache hits of the most possible, {where}", ZHENG, "96 % of the most possible, on average",
        f"{ratio:.1%} (hit rate {trace.hit_rate:.0%})", "100 %" if share >= 1 else "", share < 1 or ratio == 1, ratio,
    )  # fmt: skip


def preemption() -> Verdict:
    """Every token of every request, with a cache of a tenth of the memory that all would like."""
    jobs = chat_jobs(120, mean_input=161, mean_output=338, seed=5, longest=CONTEXT)
    roomy = paged(jobs, num_blocks=100_000)
    tight = simulation.run(jobs, num_blocks=256, prefix_cache=True)
    same = tight.outputs == roomy.outputs and tight.final_blocks_used == 0
    lost = sum(len(tokens) for tokens in roomy.outputs.values()) - tight.output_tokens
    return Verdict(
        f"tokens lost or changed by {tight.num_preemptions} preemptions", KWON, "none: recomputed or swapped",
        f"{lost} lost, outputs {'identical' if same else 'DIFFER'}", "0 lost, identical",
        same and lost == 0 and tight.num_preemptions > 0, lost,
    )  # fmt: skip


CLAIMS: tuple[Callable[[], Verdict], ...] = (
    memory_waste,
    lambda: more_running(reservation.reserve_exact, "exact reservation", "2.2 x", 1.8),
    lambda: more_running(reservation.reserve_pow2(CONTEXT), "powers of two", "2.6 x", 1.8),
    lambda: more_running(reservation.reserve_max(CONTEXT), "the longest possible", "4.3 x", 3.5),
    block_size_curve,
    *(lambda n=n: parallel_sampling(n) for n in (2, 4, 6)),
    continuous_batching,
    *(lambda share=share: hit_rate(share) for share in (1.0, 0.5, 0.25)),
    preemption,
)
