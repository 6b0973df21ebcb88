"""What each numeric mode of the CPU backend costs in accuracy, on a fixed text, against float32 on the same weights.

python benchmarks/kernels/accuracy.py [--tokens 8192] [--model FILE] [--json FILE]

The text is the language reference that every Python carries (pydoc_data.topics), cut into windows of 512 tokens. Each
mode scores the same tokens: perplexity, how often its likeliest next token is float32's, and the mean KL divergence.
"""

import argparse
import json
import math
import pydoc_data.topics
import sys
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kernels.backend import resolve
from kernels.layout import KVCacheSpec
from kernels.metadata import AttentionMetadata
from server.bench.arguments import Parser, output_file, whole
from server.models.decoder import Decoder
from server.models.registry import read_spec
from server.tokenizer import load_tokenizer
from server.weights.load import load_model
from server.weights.locate import locate

WINDOW = 512
BLOCK = 16


@dataclass(frozen=True)
class Mode:
    name: str
    backend: str
    dtype: torch.dtype
    keep_quantized: bool


MODES = (
    Mode("float32", "cpu", torch.float32, False),
    Mode("bfloat16, weights dequantized", "cpu", torch.bfloat16, False),
    Mode("bfloat16, weights as in the file (default)", "cpu", torch.bfloat16, True),
)


@dataclass(frozen=True)
class Score:
    mode: str
    perplexity: float
    agreement: float
    mean_kl: float


def window_meta() -> AttentionMetadata:
    blocks = WINDOW // BLOCK
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, WINDOW], dtype=torch.int32),
        seq_lens=torch.tensor([WINDOW], dtype=torch.int32),
        page_table=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(BLOCK, BLOCK + WINDOW),
        positions=torch.arange(WINDOW),
        num_requests=1,
        num_tokens=WINDOW,
        max_query_len=WINDOW,
        max_seq_len=WINDOW,
    )


def load(model: str, mode: Mode) -> Decoder:
    files = locate(model)
    decoder = load_model(
        files,
        read_spec(files),
        resolve(mode.backend, "cpu"),
        dtype=mode.dtype,
        device=torch.device("cpu"),
        keep_quantized=mode.keep_quantized,
        on_progress=lambda share: None,
    )
    decoder.prepare_positions(WINDOW)
    return decoder


@torch.inference_mode()
def score(decoders: list[Decoder], windows: torch.Tensor) -> list[Score]:
    """windows: i64[N, WINDOW]. The first decoder is the one that the others are compared with."""
    meta = window_meta()
    caches = []
    for decoder in decoders:
        spec = decoder.spec
        kv = KVCacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK, decoder.dtype)
        caches.append(decoder.ops.allocate_kv_cache(kv, num_blocks=WINDOW // BLOCK + 1, device=torch.device("cpu")))
    losses, same, divergence = ([0.0] * len(decoders) for _ in range(3))
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        for window in progress.track(windows, description="windows"):
            base: torch.Tensor | None = None
            for i, (decoder, cache) in enumerate(zip(decoders, caches, strict=True)):
                logits = decoder.logits(decoder.forward(window, meta, cache))[:-1]  # [WINDOW - 1, V]
                logprobs = logits.log_softmax(-1)
                base = logprobs if base is None else base
                losses[i] -= logprobs.gather(1, window[1:, None]).sum().item()
                same[i] += (logprobs.argmax(-1) == base.argmax(-1)).sum().item()
                divergence[i] += (base.exp() * (base - logprobs)).sum().item()
    count = len(windows) * (WINDOW - 1)
    return [
        Score(mode.name, math.exp(losses[i] / count), same[i] / count, divergence[i] / count)
        for i, mode in enumerate(MODES)
    ]


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(WINDOW), default=8192)
    parser.add_argument("--model", default="", help="default: the embedded model")
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = load_tokenizer(locate(args.model)).encode(text[: args.tokens * 8])
    count = min(args.tokens, len(ids)) // WINDOW
    windows = torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)
    scores = score([load(args.model, mode) for mode in MODES], windows)
    table = Table(
        "mode", "perplexity", "same first choice", "mean KL, nats", title=f"{count} windows of {WINDOW} tokens"
    )
    for one in scores:
        table.add_row(one.mode, f"{one.perplexity:.4f}", f"{one.agreement:.2%}", f"{one.mean_kl:.5f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in scores], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
