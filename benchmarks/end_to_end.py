"""Pre-train, export, load in transformers, fine-tune on conversations and generate, each by its own command.

    python benchmarks/end_to_end.py --corpus FOLDER --steps 800
    python benchmarks/end_to_end.py --recipe smoke --steps 20 --tune-steps 5 --out /tmp/e2e        (a minute on a CPU)

The conversations ask what a function of Python's standard library does; the answer is the first line of its docstring.
Further options are those of the first `tilemoe train`. Appends a row to results/end_to_end.jsonl: the curves, what the
exported model's loss is in transformers, the loss on held-out conversations before and after, and what is generated.
"""

from __future__ import annotations

import argparse
import ast
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tilemoe import load_hf
from tilemoe.bench import record
from tilemoe.data.corpus import open_corpus
from tilemoe.train.checkpoints.folder import resolve_checkpoint
from tilemoe.train.metrics import read_metrics

NAME = "end_to_end"
LONGEST_SOURCE = 1500  # characters of a function that is asked about
CONVERSATIONS = 4000
HELDOUT_EVERY = 20  # of the conversations, in training and before and after it
CURVE_POINTS = 80
PROMPTS = ("def read_json(path):\n", "class Queue:\n")
QUESTION = "user:\nWhat does this function do?\n\ndef is_even(number):\n    return number % 2 == 0\n\nassistant:\n"


def tilemoe(*arguments: object) -> tuple[str, float]:
    """Standard output of a command and its seconds; what it says beside is shown."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "tilemoe", *map(str, arguments)]
    print("$", *command[2:], flush=True)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout, round(time.perf_counter() - start, 1)


def conversations() -> Iterator[dict[str, Any]]:
    """Of each short function of the standard library that has a docstring."""
    for text in open_corpus("stdlib").documents():
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
                continue
            node.body = node.body[1:] or [ast.Pass()]
            source, answer = ast.unparse(node), docstring.splitlines()[0]
            if len(source) <= LONGEST_SOURCE and answer:
                question = f"What does this function do?\n\n{source}"
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_conversations(path: Path) -> int:
    lines = [json.dumps(each) for _, each in zip(range(CONVERSATIONS), conversations(), strict=False)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def curves(run_dir: Path) -> dict[str, Any]:
    """[step, nats/token] in training, thinned out, and [step, nats/token, nats/byte, whole split] held out."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    training = [each for each in records if each["kind"] == "train"]
    heldout = [each for each in records if each["kind"] == "eval"]
    kept = training[:: max(1, len(training) // CURVE_POINTS)]
    speeds = sorted(each["tokens_per_second"] for each in training)
    return {
        "training": [[each["step"], round(each["nats_per_token"], 4)] for each in kept],
        "heldout": [
            [each["step"], round(each["nats_per_token"], 5), each["nats_per_byte"], each["whole_split"]]
            for each in heldout
        ],
        "tokens_per_second": round(speeds[len(speeds) // 2], 1),
    }


@torch.no_grad()
def against_transformers(folder: Path) -> dict[str, float]:
    """Loss of the same random tokens by transformers' model and by ours, both in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    ids = AutoTokenizer.from_pretrained(folder)("\n".join(PROMPTS) * 3, return_tensors="pt").input_ids.to(device)
    loss = theirs(ids, labels=ids).loss.item()
    del theirs
    ours = load_hf(folder, device=device).eval()
    return {"transformers": loss, "tilemoe": ours(ids[:, :-1], ids[:, 1:]).loss.item()}


def chat_loss(folder: Path, chats: Path, seq_len: int) -> str:
    found, _ = tilemoe(
        "eval", "--checkpoint", folder, "--corpus", chats, "--format", "chat", "--too-long", "skip",
        "--seq-len", seq_len, "--batch-size", 4, "--heldout-every", HELDOUT_EVERY,
    )  # fmt: skip
    return found.strip()


def measure(args: argparse.Namespace, more: list[str], out: Path, row: dict[str, Any]) -> None:
    """Fill ``row``: what was measured before a step that fails stays."""
    pretrained, exported, chats, tuned = out / "pretrain", out / "exported", out / "chats.jsonl", out / "tuned"
    _, row["pretrain_seconds"] = tilemoe(
        "train", "--recipe", args.recipe, "--data.corpus", args.corpus, "--train.steps", args.steps,
        "--train.out-dir", pretrained, *more,
    )  # fmt: skip
    result = json.loads((pretrained / "result.json").read_text())
    row |= {key: result[key] for key in ("training_tokens", "parameters", "heldout_nats_per_byte")}
    row["corpus_digest"] = resolve_checkpoint(pretrained, verify=False).state.data_fingerprint
    row["pretrain"] = curves(pretrained)
    _, row["export_seconds"] = tilemoe("export", "--checkpoint", pretrained, "--out", exported)
    row["loss"] = against_transformers(exported)
    row["conversations"] = write_conversations(chats)
    row["chat_before"] = chat_loss(exported, chats, args.tune_seq_len)
    _, row["tune_seconds"] = tilemoe(
        "train", "--recipe", args.recipe, "--init-from", exported, "--data.format", "chat", "--data.corpus", chats,
        "--data.too-long", "skip", "--data.heldout-every", HELDOUT_EVERY, "--data.seq-len", args.tune_seq_len,
        "--data.batch-size", 8, "--optim.lr", 1e-4,
        "--optim.warmup-steps", 10, "--train.accumulation", 1, "--train.steps", args.tune_steps,
        "--train.eval-every", 0, "--train.save-every", 0, "--train.sample-tokens", 0, "--train.out-dir", tuned,
    )  # fmt: skip
    row["tune"] = curves(tuned)
    row["chat_after"] = chat_loss(tuned, chats, args.tune_seq_len)
    asked = [(pretrained, prompt) for prompt in PROMPTS] + [(tuned, QUESTION)]
    row["generated"] = [
        tilemoe("generate", "--checkpoint", run, "--prompt", prompt, "--max-new-tokens", 80, "--temperature", 0.5)[0]
        for run, prompt in asked
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="single-gpu")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--tune-steps", type=int, default=60)
    parser.add_argument("--tune-seq-len", type=int, default=512)
    parser.add_argument("--out", type=Path, help="a folder to keep what is written; default: a temporary one")
    args, more = parser.parse_known_args()
    row: dict[str, Any] = {"recipe": args.recipe, "steps": args.steps, "arguments": more}
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # a time limit's, too
    try:
        with tempfile.TemporaryDirectory() as temporary:
            measure(args, more, args.out or Path(temporary), row)
    finally:
        print(json.dumps(row, indent=1))
        record.append(NAME, [row])


if __name__ == "__main__":
    main()
