"""Agreement of the default model with transformers: `python benchmarks/parity.py [--dtype float32|auto]`.

The reference is transformers' LlamaForCausalLM in float32 on the same weights, dequantised. All prompts run through our
engine at once (paged, chunked, in company); each of the answer's positions is then compared with the reference's
distribution behind the same tokens. Equal argmax at every position is the same as equal greedy answers.
"""

import json
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from server.bench.arguments import Parser, output_file
from server.config import CacheConfig, EngineConfig, ModelConfig
from server.engine.assemble import assemble
from server.models.registry import read_spec
from server.protocol import GenerateRequest, SamplingParams, TokenLogprobs
from server.tokenizer import Tokenizer, load_tokenizer
from server.weights.load import dense, open_source
from server.weights.locate import locate

SHORT = [
    "The capital of France is", "Once upon a time", "2 + 2 =", "Water boils at", "The sky is blue because",
    "In 1969, the first man on the Moon", "My favourite recipe for bread:", "To be or not to be, that is the",
    "Dear Sir or Madam,", "The three laws of robotics are",
]  # fmt: skip
KOREAN = ["대한민국의 수도는", "안녕하세요, 저는", "옛날 옛적에 한 마을에", "서울에서 부산까지 기차로"]
CODE = [
    "def fibonacci(n):\n    ", "#include <stdio.h>\nint main(void) {\n    ", "SELECT name, COUNT(*) FROM users ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "const sum = (a, b) => a + b;\nconst product = ",
]  # fmt: skip
LONG_TOKENS = (500, 1000, 2000, 2000, 2000)
OUTPUT_TOKENS = 64
TOP = 20


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """24 prompts: short, Korean, code, and long ones of up to 2,000 tokens."""
    story = " ".join(
        f"On day {k} the traveller met {k % 7 + 2} merchants and wrote: {SHORT[k % 10]}." for k in range(400)
    )
    known = tokenizer.encode(story)
    longs = [known[k * 37 : k * 37 + length] for k, length in enumerate(LONG_TOKENS)]
    return [tokenizer.encode(text) for text in SHORT + KOREAN + CODE] + longs


def answers(dtype: str, tokenized: list[list[int]]) -> list[list[TokenLogprobs]]:
    """Greedy answers of our engine, every token with its TOP most likely alternatives."""
    config = EngineConfig(model=ModelConfig(dtype=dtype), cache=CacheConfig(num_blocks=2048))
    core, _ = assemble(config, lambda phase, share: None)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0, temperature=0.0, logprobs=TOP)
    for index, prompt in enumerate(tokenized):
        core.add(GenerateRequest(str(index), prompt, sampling, time.monotonic()))
    found: list[list[TokenLogprobs]] = [[] for _ in tokenized]
    while core.has_work:
        for delta in core.execute(core.schedule()).deltas:
            found[int(delta.request_id)] += delta.logprobs or []
    core.check_invariants()
    return found


def reference() -> LlamaForCausalLM:
    """transformers' model with the default model's weights, dequantised to float32."""
    files = locate("")
    spec = read_spec(files)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    source = open_source(files, spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dense(source.get(name), torch.float32))
    model.tie_weights()
    return model.eval()


def compare(model: LlamaForCausalLM, prompt: list[int], answer: list[TokenLogprobs]) -> tuple[int, float]:
    """(how many tokens from the start are the reference's greedy choice, largest log-probability difference)."""
    output = [entry.token_id for entry in answer]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    agrees = [expected[k].argmax().item() == token for k, token in enumerate(output)]
    difference = max(
        (expected[k][entry.top_ids] - torch.tensor(entry.top_logprobs)).abs().max().item()
        for k, entry in enumerate(answer)
    )
    return (agrees.index(False) if False in agrees else len(agrees)), difference


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", help="of our engine; auto is what serve uses [%(default)s]")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    tokenized = prompts(load_tokenizer(locate("")))
    ours = answers(arguments.dtype, tokenized)
    model = reference()
    results = [compare(model, prompt, answer) for prompt, answer in zip(track(tokenized), ours, strict=True)]
    whole = sum(equal == OUTPUT_TOKENS for equal, _ in results)
    first = sum(equal > 0 for equal, _ in results)
    table = Table(title=f"{len(results)} prompts of 3 to {max(map(len, tokenized))} tokens, {arguments.dtype}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row(f"greedy answers equal over {OUTPUT_TOKENS} tokens", f"{whole} of {len(results)}")
    table.add_row("first tokens equal", f"{first} of {len(results)}")
    table.add_row("tokens equal before the first difference, mean", f"{sum(e for e, _ in results) / len(results):.1f}")
    table.add_row(f"largest difference of the top {TOP} log-probabilities", f"{max(d for _, d in results):.2e}")
    Console().print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"dtype": arguments.dtype, "equal_tokens": [e for e, _ in results],
                       "largest_difference": [d for _, d in results]}, file)  # fmt: skip


if __name__ == "__main__":
    main()
