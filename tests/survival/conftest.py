"""A tiny random checkpoint, and supervised engines of it in processes of their own."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from server.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from server.frontend.engine_client import SupervisedEngine
from server.frontend.launcher import ProcessLauncher
from server.protocol import GenerateRequest, OutputDelta, SamplingParams
from tests.models.checkpoints import make_model
from tests.tokenizer.vocabularies import spm_metadata
from tests.weights.gguf_files import gguf_name, permute

Started = Callable[..., contextlib.AbstractAsyncContextManager[SupervisedEngine]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny model: weights, vocabulary, chat template."""
    model = make_model("llama", vocab_size=288, num_hidden_layers=2)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    for key, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    vocabulary = spm_metadata()
    writer.add_tokenizer_model(vocabulary.pop("tokenizer.ggml.model"))
    writer.add_token_list(vocabulary.pop("tokenizer.ggml.tokens"))
    writer.add_token_scores(vocabulary.pop("tokenizer.ggml.scores"))
    writer.add_token_types(vocabulary.pop("tokenizer.ggml.token_type"))
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = permute(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        writer.add_tensor(gguf_name(name, gemma=False), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def started(checkpoint: Path) -> Started:
    @contextlib.asynccontextmanager
    async def start(*, faults: str = "", step_timeout_s: float = 60) -> AsyncIterator[SupervisedEngine]:
        config = EngineConfig(
            model=ModelConfig(model=str(checkpoint), dtype="float32"),
            cache=CacheConfig(num_blocks=256),
            device=DeviceConfig(device="cpu", num_threads=1),
            faults=faults,
        )
        client = SupervisedEngine(ProcessLauncher(), config, max_queue=1000, step_timeout_s=step_timeout_s)
        await client.start()
        try:
            await client.wait_ready()
            yield client
        finally:
            await client.stop()

    return start


@pytest.fixture(scope="session")
def undisturbed(started: Started) -> list[list[OutputDelta]]:
    """What requests 0 to 15 get from an engine that nothing happens to."""
    answers: list[list[OutputDelta]] = []

    async def main() -> None:
        async with started() as client:
            answers.extend(await asyncio.gather(*(collect(client, request(i)) for i in range(16))))

    run(main())
    return answers


def run(main: Awaitable[None], limit_s: float = 120) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await main

    asyncio.run(bounded())


def request(index: int, *, max_tokens: int = 64, **fields: Any) -> GenerateRequest:
    """Every other one is sampled."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=index, temperature=0.0 if index % 2 else 1.0, logprobs=2)
    prompt = [(index * 7 + k * k) % 250 for k in range(5 + index % 40)]
    return GenerateRequest(f"r{index}", prompt, sampling, time.monotonic(), **fields)


async def collect(client: SupervisedEngine, r: GenerateRequest) -> list[OutputDelta]:
    return [delta async for delta in client.generate(r)]


def tokens(deltas: list[OutputDelta]) -> list[int]:
    return [t for delta in deltas for t in delta.token_ids]


async def idle_usage(client: SupervisedEngine) -> dict[str, int]:
    """The engine's page map, once no request is open. Getting it also runs the engine's own check of its books."""
    inspection = await client.inspect()
    assert inspection["requests"] == []
    pages: dict[str, int] = inspection["pages"]
    return pages
