"""lm-eval's local-completions: a multiple-choice task and a generation task made on the spot, both without a network.

python lm_eval_client.py URL MODEL
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
import requests
import yaml
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "Bread"], "answer": 0},
    {"question": "Grass and leaves are usually colored", "choices": ["purple", "green", "seven"], "answer": 1},
    {"question": "One, two, three, four,", "choices": ["nine", "three", "five"], "answer": 2},
    {"question": "The opposite of hot is", "choices": ["cold", "table", "hotter"], "answer": 0},
]


def main(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, task in _tasks(Path(folder)).items():
            Path(folder, f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task}))
        report = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": 4},
            tasks=["local_choice", "local_words"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    assert report["results"]["local_choice"]["acc,none"] >= 0.75, report["results"]
    for sample in report["samples"]["local_choice"]:
        for choice, [(logprob, _greedy)] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            expected = score(url, model, sample["doc"]["question"], " " + choice)
            assert abs(logprob - expected) < 1e-3, (sample["doc"], choice, logprob, expected)
    words = report["samples"]["local_words"]
    assert all(sample["resps"][0][0] and "\n" not in sample["resps"][0][0] for sample in words), words


def score(url: str, model: str, context: str, continuation: str) -> float:
    """log P(continuation | context), asked for by hand."""
    body = {"model": model, "prompt": context + continuation, "echo": True, "max_tokens": 0, "logprobs": 0}
    logprobs = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
    after = zip(logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
    return sum(logprob for offset, logprob in after if offset >= len(context))


def _tasks(folder: Path) -> dict[str, dict[str, object]]:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choice = {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    words = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return {"local_choice": common | choice, "local_words": common | words}


if __name__ == "__main__":
    main(*sys.argv[1:])
