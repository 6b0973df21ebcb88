"""Tiny vocabularies, as a GGUF's metadata holds them and as a Hugging Face folder does."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "the cat sat on the mat, and the dog sat on the log.",
    "안녕하세요 세계, 한국어 문장입니다.",
    "def f(x):\n    return x + 12345\n",
    "it's what they've said: we'll see",
]

SPM_TYPES = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|turn|>": 3, "<note>": 4}


def spm_metadata(*, add_space_prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece vocabulary of words that "▁hello" and friends merge up to, and all 256 byte tokens."""
    special = ["<unk>", "<s>", "</s>", "<|turn|>", "<note>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = ["he", "ll", "hell", "hello", "▁w", "or", "▁wor", "ld", "▁world", "▁hello", "▁▁", "▁he", "lo"]
    letters = ["▁", *"helowrdxy"]
    tokens = special + byte_tokens + merged + letters
    scores = [0.0] * (len(special) + len(byte_tokens)) + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [SPM_TYPES.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def byte_level_backend(pre: list[Any], *, ignore_merges: bool = False, nfc: bool = False) -> Backend:
    """A byte-level BPE tokenizer trained on CORPUS, with the pre-tokenizers given."""
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(pre)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|begin|>", "<|im_end|>", "<|endoftext|>"])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return backend


def gguf_metadata_of(backend: Backend, pre: str, *, merges_as_pairs: bool = False) -> dict[str, Any]:
    """The same vocabulary as a GGUF would hold it."""
    model = json.loads(backend.to_str())["model"]
    by_id = {id_: token for token, id_ in backend.get_vocab().items()}
    tokens = [by_id[id_] for id_ in range(len(by_id))]
    added = backend.get_added_tokens_decoder()
    types = [(3 if added[id_].special else 4) if id_ in added else 1 for id_ in range(len(tokens))]
    merges = [list(merge) if merges_as_pairs else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def write_hf_folder(folder: Path, backend: Backend, **files: dict[str, Any]) -> Path:
    """A folder with tokenizer.json and, by name, further JSON files; the weights are an empty file."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").touch()
    for name, content in {"config": {"model_type": "llama"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
