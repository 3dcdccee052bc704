"""Seconds of load_hf of an exported model in bf16, with its checksums and without, in turn; results/load.jsonl.

python benchmarks/load.py FOLDER RECIPE    # FOLDER on the disk that is measured
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import torch

import tilemoe
from tilemoe.bench import record
from tilemoe.models.huggingface import read_model, save_hf
from tilemoe.models.sums import SHARD_BYTES, SUMS_FILE, file_entries, manifest_of
from tilemoe.train.config import load_recipe

folder = Path(sys.argv[1])
shutil.rmtree(folder, ignore_errors=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = load_recipe(sys.argv[2]).model
model = tilemoe.DecoderLM(config, device=device, dtype=torch.bfloat16)
save_hf(model, folder, max_shard_bytes=SHARD_BYTES)
del model
if device == "cuda":
    torch.cuda.empty_cache()
weights = sorted(folder.glob("*"))
(folder / SUMS_FILE).write_bytes(manifest_of(file_entries(weights)))
files = sorted(folder.glob("*"))
size = sum(p.stat().st_size for p in files)
for p in files:
    fd = os.open(p, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def cold():
    for p in files:
        fd = os.open(p, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sync():
    if device == "cuda":
        torch.cuda.synchronize()


def timed(load):
    sync()
    t = time.perf_counter()
    m = load(folder, device)
    sync()
    s = time.perf_counter() - t
    del m
    return s


WAYS = {
    "with": lambda f, d: tilemoe.load_hf(f, device=d, dtype=torch.bfloat16),
    "without": lambda f, d: read_model(f, torch.device(d), torch.bfloat16),
}
for cache in ("warm", "cold"):
    times = {"with": [], "without": []}
    for turn in range(7):
        for name in list(WAYS) if turn % 2 else list(WAYS)[::-1]:
            if cache == "cold":
                cold()
            s = timed(WAYS[name])
            if turn:
                times[name].append(round(s, 3))
    row = {
        "mode": "load_hf",
        "model": sys.argv[2],
        "device": device,
        "page_cache": cache,
        "bytes": size,
        "files": len(files),
        "seconds_with_checksums": times["with"],
        "seconds_without": times["without"],
        "ratio": round(median(times["with"]) / median(times["without"]), 4),
    }
    print(json.dumps(row), flush=True)
    record.append("load", [row])
