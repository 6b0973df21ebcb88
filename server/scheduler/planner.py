"""Who gets how much of a step.

Order of service (see RequestQueue) decides everything: running requests come before waiting ones, and when blocks run
out, the last in order gives its up. The first in order is therefore never preempted for another, so it finishes, and by
induction everyone does.
"""

from dataclasses import dataclass, field

from paging import NO_MATCH, PrefixMatch, blocks_needed, extend_hashes
from server.config import SchedulerConfig
from server.scheduler.books import Books
from server.scheduler.request import Request, RequestStatus


@dataclass(slots=True)
class StepPlan:
    """A step in the making. Written by: StepPlanner only.

    budget_left: new tokens that the step can still take.
    num_new_tokens: of each request in the step, in the order in which they are computed.
    prefills: requests with more than one token to run, whether they got a share or not.
    """

    budget_left: int
    num_new_tokens: dict[Request, int] = field(default_factory=dict)
    prefills: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    has_preempted: bool = False

    def first_share(self, wanted: int) -> int:
        """A prefill that can't finish in this step leaves a quarter of the budget to those behind it.

        So a short prompt does not wait for the end of a long one. What they don't use comes back to the long one.
        """
        left = self.budget_left
        return wanted if wanted <= left else left - left // 4

    def give(self, request: Request, num_tokens: int) -> None:
        self.num_new_tokens[request] = self.num_new_tokens.get(request, 0) + num_tokens
        self.budget_left -= num_tokens

    def take_back(self, request: Request) -> None:
        self.budget_left += self.num_new_tokens.pop(request, 0)


class StepPlanner:
    """Decides; what it decides about blocks and rows is done at once, in the books."""

    def __init__(self, *, books: Books, config: SchedulerConfig) -> None:
        self._books = books
        self._manager = books.manager
        self._block_size = books.manager.block_size
        self._budget = config.max_num_batched_tokens
        self._prefill_budget = config.max_num_prefill_tokens or config.max_num_batched_tokens
        self._prefill_tokens_per_stream = config.prefill_tokens_per_stream
        self._forecasts = config.admission == "forecast"
        self._watermark = int(config.watermark * books.manager.num_blocks)
        self._suspect: Request | None = None

    def plan(self, now: float) -> StepPlan:
        plan = StepPlan(budget_left=self._budget)
        if self._plan_suspect(plan, now):
            return plan
        self._plan_running(plan)
        if len(self._books.waiting) and not plan.has_preempted:
            self._admit_waiting(plan, now)
        self._share_leftover(plan)
        return plan

    def _plan_suspect(self, plan: StepPlan, now: float) -> bool:
        """A request that may have killed an engine gets steps of its own, until it has produced a token.

        The running requests pause meanwhile. False: nobody is under suspicion, or there is no room for the one who is.
        """
        suspect = self._suspect
        if suspect is not None and suspect.run_alone and suspect.status is RequestStatus.RUNNING:
            chunk = min(len(suspect.token_ids) - suspect.num_computed_tokens, self._budget)
            if self._make_room(suspect, suspect.num_computed_tokens + chunk, plan):
                plan.give(suspect, chunk)
                return True
        self._suspect = None
        books = self._books
        if not len(books.waiting) or not books.free_rows or not books.waiting[0].run_alone:
            return False
        match = self._match(books.waiting[0])
        if match is None or not self._admit(books.waiting[0], match, plan, now):
            return False
        (self._suspect,) = plan.admitted
        return True

    def _plan_running(self, plan: StepPlan) -> None:
        """One token for everyone who needs just that, then chunks for the others out of what is left of the budget.

        Where somebody waits for a next token, chunks are kept short: a step takes as long as its longest part.
        """
        for request in self._books.running:  # making room may remove requests from its end, never any before
            num_to_run = request.num_tokens_to_run
            if num_to_run > 1:
                plan.prefills.append(request)
            elif num_to_run == 1 and self._make_room(request, request.num_tokens, plan):
                plan.num_new_tokens[request] = 1
        plan.budget_left -= len(plan.num_new_tokens)
        if plan.num_new_tokens:
            most = self._prefill_budget + self._prefill_tokens_per_stream * len(plan.num_new_tokens)
            plan.budget_left = min(plan.budget_left, most)
        for request in plan.prefills:
            if request.status is not RequestStatus.RUNNING or plan.budget_left == 0:
                continue
            chunk = plan.first_share(len(request.token_ids) - request.num_computed_tokens)
            if self._make_room(request, request.num_computed_tokens + chunk, plan):
                plan.give(request, chunk)

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """A place for the request's first num_tokens tokens, at the cost of those behind it; False: it was the last."""
        while not self._manager.extend(request.row, num_tokens):
            last = self._books.running[-1]
            plan.take_back(last)
            plan.has_preempted = True
            self._books.preempt(last)
            if last is request:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan, now: float) -> None:
        """In order, until rows, budget or blocks run out.

        A request whose prefix is being computed is passed over, and keeps its claim on a row meanwhile.
        """
        books = self._books
        passed_over = 0
        while plan.budget_left and passed_over < min(len(books.free_rows), len(books.waiting)):
            request = books.waiting[passed_over]
            if request.run_alone:
                return
            match = self._match(request)
            if match is None:
                passed_over += 1
            elif not self._admit(request, match, plan, now):
                return

    def _match(self, request: Request) -> PrefixMatch | None:
        """What the prefix cache holds of it; None: wait, a running request is computing the next block it needs.

        The last token is always computed: its logits are what the request is here for. A request that owes the
        logprobs of its prompt needs the logits of all of it.
        """
        if not self._manager.enable_prefix_cache:
            return NO_MATCH
        extend_hashes(request.block_hashes, request.token_ids, block_size=self._block_size, salt=request.cache_salt)
        if request.owes_prompt_logprobs:
            return NO_MATCH
        wanted = request.block_hashes[: (len(request.token_ids) - 1) // self._block_size]
        match = self._manager.match(wanted)
        num_found = len(match.block_ids)
        if num_found < len(wanted) and wanted[num_found] in self._books.inflight:
            return None
        return match

    def _admit(self, request: Request, match: PrefixMatch, plan: StepPlan, now: float) -> bool:
        """Gives it a row and its first chunk, if there are blocks for all its tokens, or for what all will have."""
        num_tokens = len(request.token_ids)
        num_found = len(match.block_ids)
        num_cached = num_found * self._block_size
        wanted = blocks_needed(num_tokens, self._block_size) - num_found
        if len(self._books.running):
            if self._forecasts and not request.run_alone:
                growth = self._books.forecast.growth(self._books.running, request, num_tokens - num_cached)
                wanted = max(wanted, blocks_needed(growth, self._block_size))
            wanted += self._watermark + self._blocks_owed(plan)
        if wanted + match.num_revived > self._manager.num_free_blocks:
            return False
        chunk = plan.first_share(num_tokens - num_cached)
        if not self._manager.admit(self._books.next_row, match, num_cached + chunk):
            return False
        self._books.seat(request, num_cached_blocks=num_found, now=now)
        plan.admitted.append(request)
        plan.prefills.append(request)
        plan.give(request, chunk)
        return True

    def _blocks_owed(self, plan: StepPlan) -> int:
        """Blocks that running requests still need for tokens they already have: they were admitted on the promise."""
        return sum(
            blocks_needed(len(request.token_ids), self._block_size) - len(self._manager.blocks_of(request.row))
            for request in plan.prefills
        )

    def _share_leftover(self, plan: StepPlan) -> None:
        """Budget that nobody else took goes to the unfinished prefills, in order, as far as blocks are free."""
        for request in plan.prefills:
            if plan.budget_left == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            end = request.num_computed_tokens + plan.num_new_tokens.get(request, 0)
            more = min(len(request.token_ids) - end, plan.budget_left)
            if more and self._manager.extend(request.row, end + more):
                plan.give(request, more)
