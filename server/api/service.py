"""What the endpoints share: the model's name, its limits, encoding, and the start of a generation."""

import asyncio
import math
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from server.api.schemas import GenerationBody
from server.api.transport import BodyReader
from server.config import ApiConfig
from server.errors import EngineRestarting, InvalidRequest, ModelNotFound, PromptTooLong
from server.frontend.client import EngineClient
from server.frontend.generation import Generation, Job, Prompt
from server.frontend.params import (
    ModelBounds,
    SamplingOptions,
    check_num_choices,
    check_stop_strings,
    check_token_ids,
    resolve_sampling,
    truncate_prompt,
)
from server.frontend.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from server.frontend.tools import FORMATS
from server.metrics.prometheus import Metrics
from server.protocol import Ready
from server.structured import GrammarCompiler
from server.tokenizer import ChatTemplate, Tokenizer

ENCODE_IN_THREAD_CHARS = 4096
"""Longer texts are encoded off the event loop: a step's tokens must not wait for them."""
_LARGE_BODIES = 8
"""How many bodies of the largest size may be arriving at once."""
_TEMPLATE_THREADS = 2
_MAX_SALT_CHARS = 256
_PRIORITY_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    names: tuple[str, ...]
    """What requests may call it."""
    created: int = 0
    """Unix seconds."""
    defaults: SamplingDefaults = OPENAI_DEFAULTS

    @property
    def name(self) -> str:
        """What answers call it where the request doesn't."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A prompt before its length is checked. param: the field it came from."""

    token_ids: list[int]
    text: str | None
    param: str


class Service:
    """Written by: nobody after construction."""

    def __init__(
        self,
        *,
        client: EngineClient,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        model: ModelInfo,
        config: ApiConfig,
        metrics: Metrics,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model = model
        self.config = config
        self.limits = config.limits
        self.metrics = metrics
        self.tool_format = FORMATS.get(config.tool_call_parser)
        """How the model writes tool calls; None: as its chat template says."""
        self.bodies = BodyReader(
            max_bytes=config.limits.max_body_bytes, max_total_bytes=config.limits.max_body_bytes * _LARGE_BODIES
        )
        self.template_threads = ThreadPoolExecutor(_TEMPLATE_THREADS, thread_name_prefix="template")
        """For templates out of requests: a slow one makes others of its kind wait, and nobody else."""
        self.grammars = GrammarCompiler(tokenizer, max_source_bytes=config.limits.max_grammar_bytes)

    def check_model(self, name: str | None) -> None:
        """No name means the only model there is."""
        if name is not None and name not in self.model.names:
            raise ModelNotFound(
                f"The model {name[:200]!r} does not exist; this server has {self.model.name!r}", param="model"
            )

    def ready(self) -> Ready:
        state = self.client.state
        if state.ready is None:
            raise EngineRestarting(f"The model is not ready yet: {state.phase}", retry_after=2.0)
        return state.ready

    def bounds(self) -> ModelBounds:
        return ModelBounds.of(self.ready(), tokenizer_vocab_size=self.tokenizer.vocab_size)

    def refuse_too_long(self, text: str, *, param: str) -> None:
        """Raises PromptTooLong for what can't fit, before it is encoded: a text of megabytes costs next to nothing."""
        at_least, most = self.tokenizer.min_num_tokens(text), self.ready().max_model_len
        if at_least > most:
            raise PromptTooLong(
                f"This model's maximum context length is {most} tokens, the prompt has {at_least} or more",
                param=param,
            )

    async def encode(self, text: str, *, add_special_tokens: bool, param: str, may_exceed: bool = False) -> list[int]:
        """may_exceed: it will be truncated. Raises PromptTooLong."""
        if not may_exceed:
            self.refuse_too_long(text, param=param)
        if len(text) < ENCODE_IN_THREAD_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def make_job(
        self,
        request: Request,
        body: GenerationBody,
        prompts: list[RawPrompt],
        options: SamplingOptions,
        *,
        id_prefix: str,
    ) -> Job:
        """Checks everything that is left to check, so that what follows can only fail by the server's fault."""
        bounds = self.bounds()
        n = check_num_choices(1 if body.n is None else body.n, body.best_of, self.limits)
        if n * len(prompts) > self.limits.max_queue:
            raise InvalidRequest(f"{len(prompts)} prompts with n = {n} are more than the queue holds", param="n")
        return Job(
            request_id=f"{id_prefix}{secrets.token_hex(12)}",
            prompts=[self._make_prompt(raw, options, body.truncate_prompt_tokens, bounds) for raw in prompts],
            arrival_time=request.state.arrival_time,
            n=n,
            stop=check_stop_strings(body.stop, self.limits),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            client_stop_ids=tuple(body.stop_token_ids or ()),
            priority=_checked_priority(body.priority),
            cache_salt=_checked_salt(body.cache_salt),
            client=_client_of(request),
            deadline=_deadline(body.timeout, request.state.arrival_time),
            log=request.state.log,
        )

    def generate(self, job: Job) -> Generation:
        return Generation(job, client=self.client, tokenizer=self.tokenizer, metrics=self.metrics)

    def _make_prompt(
        self, raw: RawPrompt, options: SamplingOptions, truncate: int | None, bounds: ModelBounds
    ) -> Prompt:
        token_ids = truncate_prompt(raw.token_ids, truncate, options.max_tokens, bounds)
        if not token_ids:
            raise InvalidRequest(f"{raw.param} is empty", param=raw.param)
        check_token_ids(token_ids, bounds.vocab_size, param=raw.param)
        sampling = resolve_sampling(
            options,
            defaults=self.model.defaults,
            num_prompt_tokens=len(token_ids),
            bounds=bounds,
            end_token_ids=self.tokenizer.end_token_ids,
            limits=self.limits,
            prompt_param=raw.param,
        )
        whole = len(token_ids) == len(raw.token_ids)
        return Prompt(token_ids=token_ids, sampling=sampling, text=raw.text if whole else None)


def _client_of(request: Request) -> str:
    """The API key's number where there are keys, else the address."""
    known: str | None = getattr(request.state, "client", None)
    return known or ("" if request.client is None else request.client.host)


def _checked_priority(priority: int | None) -> int:
    if priority is not None and not -_PRIORITY_LIMIT <= priority < _PRIORITY_LIMIT:
        raise InvalidRequest("priority must fit 32 bits", param="priority")
    return priority or 0


def _checked_salt(salt: str | None) -> str:
    if salt is not None and not 0 < len(salt) <= _MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt must have 1 to {_MAX_SALT_CHARS} characters", param="cache_salt")
    return salt or ""


def _deadline(timeout_s: float | None, arrival_time: float) -> float | None:
    if timeout_s is None:
        return None
    if not 0.0 < timeout_s <= 86400.0 or not math.isfinite(timeout_s):
        raise InvalidRequest(f"timeout must be above 0 and at most 86400 seconds, not {timeout_s}", param="timeout")
    return arrival_time + timeout_s


def unix_now() -> int:
    return int(time.time())


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
