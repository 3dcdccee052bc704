"""Fine-tune a full-size mixture on one GPU: a model's folder, then adapters by SFTTrainer or by `tilemoe train`.

    python benchmarks/finetune.py make /tmp/qwen3 --case Qwen3-30B-A3B
    python benchmarks/finetune.py sft /tmp/qwen3 --experts nf4_double --linear
    python benchmarks/finetune.py sft /tmp/qwen3 --experts bf16 --implementation grouped_mm
    python benchmarks/finetune.py train /tmp/qwen3 --experts nf4_double

make: all layers of a public model with random weights, drawn on the GPU from a seed, as its makers save it (gpt-oss in
MXFP4), and a tokenizer trained on the sources of installed packages, which are the text, too. sft, train: a row with
each step's loss and seconds, the peak of GPU memory (reserved, and what else the process has of the card: CUDA's
context) and of the host's anonymous memory until training starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import site
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import hf_step
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast

from tilemoe.bench import record, timing
from tilemoe.bench.record import Row

NAME = "finetune"
LAYERS = {"Qwen3-30B-A3B": 48, "gpt-oss-20b": 24}
TOKENS, LENGTH = {"Qwen3-30B-A3B": 4096, "gpt-oss-20b": 2048}, {"Qwen3-30B-A3B": 2048, "gpt-oss-20b": 1024}
EXPERTS_RANK, ATTENTION_RANK, LR = 8, 16, 2e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there models are tiny, to see that everything works
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WARM_STEPS = 10  # left out of the speed: kernels are compiled
TEXT_BYTES, VOCABULARY, END = 24 << 20, 16384, "<|endoftext|>"


# --------------------------------------------------------------------------------------------------------- the folder


def make(folder: Path, case: str, layers: int | None, seed: int) -> None:
    """Writes config, tokenizer and one .safetensors a layer; none of the model is ever whole, on host or GPU."""
    found = hf_step.MODELS[case].with_config(num_hidden_layers=LAYERS[case])
    found = found if DEVICE == "cuda" else hf_step.tiny(found).with_config(vocab_size=512)
    model_type, settings = found.model_type, dict(found.config)
    settings["num_hidden_layers"] = layers or settings["num_hidden_layers"]
    config = AutoConfig.for_model(model_type, **settings, dtype="bfloat16", eos_token_id=0, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    if model_type == "gpt_oss":
        config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    text_tokenizer(settings["vocab_size"]).save_pretrained(folder)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        found = re.match(r"model\.layers\.\d+", name)
        groups.setdefault(found.group() if found else name, {})[name] = tensor
    index, written = {}, []
    with ThreadPoolExecutor(8) as pool:
        for number, group in enumerate(groups.values()):
            file = f"model-{number:05d}.safetensors"
            blocks = [block for name, meta in group.items() for block in drawn(model_type, name, meta, generator)]
            index |= {name: file for names, _ in blocks for name in names}
            written.append(pool.submit(write, folder / file, [(names, tensor.cpu()) for names, tensor in blocks]))
    for each in written:
        each.result()  # or what failed: a full disk
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def drawn(model_type: str, name: str, meta: Tensor, generator: torch.Generator) -> Iterator[tuple[list[str], Tensor]]:
    """Names of equal parts of a tensor, one after the other, and the tensor: as a folder of the model's makers has it.

    ``meta`` (E, ...) of Qwen3's experts is a matrix each, gate and up apart; of gpt-oss' it is blocks and scales.
    """
    from tilemoe.integrations.quantized_weight import quantize_weight, saved, saved_names

    if name.endswith("norm.weight"):
        yield [name], torch.ones(meta.shape, dtype=torch.bfloat16, device=DEVICE)
        return
    tensor = torch.empty(meta.shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02, generator=generator)
    stem, _, weight = name.rpartition(".")
    if not stem.endswith(".experts") or weight.endswith("bias"):
        yield [name], tensor
    elif model_type == "gpt_oss":
        weight_parts = saved(quantize_weight(tensor, "mxfp4", is_transposed=True).data)
        yield from zip(([f"{name}_{part}"] for part in saved_names("mxfp4")), weight_parts, strict=True)
    else:
        parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else (weight,)
        yield [f"{stem}.{e}.{part}.weight" for e in range(len(meta)) for part in parts], tensor


def write(path: Path, blocks: list[tuple[list[str], Tensor]]) -> None:
    """A .safetensors file: each tensor's rows are divided evenly among its names."""
    parts: dict[str, Tensor] = {}
    for names, tensor in blocks:
        rows = tensor.flatten(0, 1) if len(names) > 1 else tensor
        parts |= zip(names, rows.chunk(len(names)) if len(names) > 1 else [rows], strict=True)
    save_file(parts, path, {"format": "pt"})


def sources() -> list[str]:
    """Sources of installed packages, in the order of their names, each once, about `TEXT_BYTES` characters of them."""
    folders = [Path(root) for root in dict.fromkeys([*site.getsitepackages(), Path(torch.__file__).parents[1]])]
    found: dict[str, None] = {}
    size = 0
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        size += 0 if text in found else len(text)
        found[text] = None
        if size > TEXT_BYTES:
            break
    return list(found)


def text_tokenizer(most: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=min(most, VOCABULARY), special_tokens=[END], initial_alphabet=alphabet)
    backend.train_from_iterator(sources()[::8], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)


# -------------------------------------------------------------------------------------------------------- SFTTrainer


class HostMemory:
    """The peak of a process's anonymous memory, in bytes, looked at every 20 ms."""

    def __init__(self, pid: int) -> None:
        self.peak, self._status, self._ended = 0, Path(f"/proc/{pid}/status"), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            try:
                found = re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text())
            except OSError:
                return
            self.peak = max(self.peak, int(found.group(1)) << 10 if found else 0)

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.peak


def load(folder: Path, args: argparse.Namespace) -> nn.Module:
    from tilemoe.integrations import transformers as integration
    from tilemoe.integrations.quantized import TilemoeConfig

    is_packed = args.experts != "bf16"
    four = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    settings: dict[str, Any] = {}
    if is_packed:
        settings["quantization_config"] = TilemoeConfig(args.experts, linear=four if args.linear else None)
    elif "quantization_config" in json.loads((folder / "config.json").read_text()):
        settings["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": DEVICE}, attn_implementation=args.attention, **settings
    )
    if args.implementation == "tilemoe":
        integration.use(model)
    else:
        model.set_experts_implementation(args.implementation)
    return model


def rows_of_tokens(folder: Path, length: int, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for text in sources()[1::8]:
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= length * count:
            return [ids[row * length : (row + 1) * length] for row in range(count)]
    raise ValueError(f"the text has no {count} rows of {length} tokens; ask for fewer steps")


def sft(folder: Path, args: argparse.Namespace) -> Row:
    """Adapters of rank 8 on experts and 16 on attention, AdamW with moments of a byte, gradient checkpointing."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    torch.zeros(1, device=DEVICE)
    if args.card_gib:
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction((args.card_gib * 2**30 - card()["context_bytes"]) / total)
    host, began = HostMemory(os.getpid()), time.perf_counter()
    model = load(folder, args)
    loading = {"seconds": round(time.perf_counter() - began, 1), "host_anonymous_bytes": host.end(), **card()}
    adapters = LoraConfig(
        r=ATTENTION_RANK,
        lora_alpha=2 * ATTENTION_RANK,
        target_modules=ATTENTION,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={r".*\.experts.*": EXPERTS_RANK},
        alpha_pattern={r".*\.experts.*": 2 * EXPERTS_RANK},
    )
    settings = SFTConfig(
        output_dir="/tmp/finetune", save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=args.tokens // args.length, max_length=args.length, max_steps=args.steps,
        learning_rate=LR, lr_scheduler_type="constant", optim="adamw_8bit" if DEVICE == "cuda" else "adamw_torch",
        gradient_checkpointing=True, bf16=DEVICE == "cuda", seed=args.seed,
    )  # fmt: skip
    data = rows_of_tokens(folder, args.length, args.steps * (args.tokens // args.length))
    clock = _Clock()
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_dict({"input_ids": data}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapters,
        callbacks=[clock],
    )
    trained, problem = sum(each.numel() for each in trainer.model.parameters() if each.requires_grad), None
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        problem = ". ".join(str(error).split(". ")[:2])
    losses = [round(entry["loss"], 5) for entry in trainer.state.log_history if "loss" in entry]
    found = {"trained": trained, "problem": problem, "losses": losses, "loading": loading}
    return {**found, **card(), **speed(clock.ends, args.tokens)}


def card() -> Row:
    """Bytes of the GPU: what PyTorch reserved at its peak, and what is in use beside that, CUDA's context mostly."""
    if DEVICE == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_reserved()
    return {"reserved_bytes": peak, "context_bytes": total - free - torch.cuda.memory_reserved()}


class _Clock(transformers.TrainerCallback):
    """When each step ended, the GPU's work included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        timing.synchronize()
        self.ends.append(time.perf_counter())


def speed(ends: list[float], tokens: int) -> Row:
    """Of steps of so many tokens that ended at these seconds; nothing where all are `WARM_STEPS`."""
    seconds = [after - before for before, after in pairwise(ends)][WARM_STEPS:]
    if not seconds:
        return {}
    return {"step_seconds": round(middle := statistics.median(seconds), 4), "tokens_per_second": round(tokens / middle)}


# -------------------------------------------------------------------------------------------------------- tilemoe train


def train(folder: Path, args: argparse.Namespace) -> Row:
    """`tilemoe train --init-from`, with the same sizes; memory as nvidia-smi sees it, less what was there before."""
    out = Path(args.out)
    storage = "dense" if args.experts == "bf16" else args.experts
    command = [sys.executable, "-m", "tilemoe", "train", "--recipe", "single-gpu", "--init-from", str(folder)]
    options = {
        "lora.rank": EXPERTS_RANK, "lora.attention-rank": ATTENTION_RANK, "lora.alpha": 2 * EXPERTS_RANK,
        "lora.storage": storage,
        "optim.name": "adamw8bit", "optim.lr": LR, "optim.schedule": "constant", "optim.warmup-steps": 0,
        "data.corpus": args.corpus, "data.seq-len": args.length, "data.batch-size": args.tokens // args.length,
        "parallel.checkpointing": "block", "train.steps": args.steps, "train.accumulation": 1, "train.log-every": 1,
        "train.eval-every": 0, "train.save-every": 0, "train.seed": args.seed, "train.out-dir": out,
        "train.device": "auto",
    }  # fmt: skip
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    before, peak = _used(), 0
    process = subprocess.Popen([*command, *args.more])
    host = HostMemory(process.pid)
    while process.poll() is None:
        peak = max(peak, _used())
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"tilemoe train ended with {process.returncode}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    return {
        "losses": [round(line["nats_per_token"], 5) for line in steps],
        "heldout": [round(line["nats_per_token"], 5) for line in lines if line["kind"] == "eval"],
        "loading": {"host_anonymous_bytes": host.end()}, "card_bytes": peak - before, "problem": None,
        **speed([line["seconds"] for line in steps], args.tokens),
    }  # fmt: skip


def _used() -> int:
    """Bytes in use on the first GPU that this process may use."""
    if DEVICE == "cpu":
        return 0
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


# ----------------------------------------------------------------------------------------------------- command line


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "sft", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", default="Qwen3-30B-A3B", choices=tuple(LAYERS))
    parser.add_argument("--layers", type=int, help="make: instead of all")
    parser.add_argument("--experts", default="nf4_double", choices=("bf16", "nf4", "nf4_double", "mxfp4"))
    parser.add_argument("--linear", action="store_true", help="sft: attention in NF4 by bitsandbytes")
    parser.add_argument("--implementation", default="tilemoe", help="sft: of experts in bf16")
    parser.add_argument("--attention", help="sft: transformers' attn_implementation")
    parser.add_argument("--card-gib", type=float, help="sft: no more than this is allocated, CUDA's context included")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, help="a step; default: the case's")
    parser.add_argument("--length", type=int, help="of a sequence; default: the case's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", default="stdlib", help="train: data.corpus")
    parser.add_argument("--out", default="/tmp/finetune-run", help="train: train.out_dir")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="train: further options, last")
    args = parser.parse_args(arguments)
    args.tokens, args.length = args.tokens or TOKENS[args.case], args.length or LENGTH[args.case]
    if args.what == "make":
        began = time.perf_counter()
        make(args.folder, args.case, args.layers, args.seed)
        print(f"made in {time.perf_counter() - began:.1f} s")
        return
    measure(args)


def measure(args: argparse.Namespace) -> None:
    """Appends a row; SystemExit where the run had no memory left."""
    layers = json.loads((args.folder / "config.json").read_text())["num_hidden_layers"]
    settings = {name: getattr(args, name) for name in ("case", "experts", "implementation", "linear", "attention")}
    settings |= {name: getattr(args, name) for name in ("tokens", "length", "seed", "card_gib", "more")}
    found = {"sft": sft, "train": train}[args.what](args.folder, args)
    versions = {name: record.version(name) for name in ("transformers", "peft", "trl", "bitsandbytes", "torchao")}
    row = {"mode": args.what, **settings, "layers": layers, **found, **versions}
    print({name: value for name, value in row.items() if name != "losses"}, flush=True)
    print("losses", row["losses"][:3], "...", row["losses"][-3:], flush=True)
    record.append(NAME, [row])
    if row.get("problem"):
        raise SystemExit(row["problem"])


if __name__ == "__main__":
    main()
