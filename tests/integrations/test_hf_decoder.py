"""Every class of transformers that is served beside those of `test_train_hf_base`: it builds, steps and keeps documents
apart, at tiny size.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from tilemoe.integrations.hf_decoder import HFDecoder, load_decoder, mixes_documents
from tilemoe.kernels.lm.documents import Documents
from tilemoe.models.hf_base import read_base
from tilemoe.testing import relative_error

pytestmark = pytest.mark.thorough
CPU, LENGTH = torch.device("cpu"), 9
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "moe_intermediate_size": 64, "head_dim": 16,
    "expert_ffn_hidden_size": 64, "ffn_hidden_size": 64, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_dense_layers": 0, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8,
    "mamba_num_heads": 8, "mamba_d_state": 16, "mamba_head_dim": 16, "mamba_d_head": 16, "sliding_window": 8,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
# What a configuration has not unless it is told.
MORE: dict[str, dict[str, Any]] = {
    "DeepseekV2": {"num_experts_per_tok": 2, "n_shared_experts": 1},
    "Dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"]},
    "HunYuanMoEV1": {"head_dim": 16},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"]},
    "Zaya": {"num_experts_per_tok": 1},
}
CLASSES = (
    "AXK2", "Afmoe", "AriaText", "BailingHybrid", "Cohere2Moe", "DeepseekV2", "DeepseekV32", "Dots1", "Ernie4_5_Moe",
    "ExaoneMoe", "FlexOlmo", "Glm4MoeLite", "GlmMoeDsa", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteMoeShared",
    "HYV3", "HYV4", "HunYuanMoEV1", "InklingText", "Jamba", "KimiLinear", "Kolibri1", "Laguna", "Lfm2Moe", "Mellum",
    "MiniMax", "MiniMaxM2", "MiniMaxM3VLText", "Phimoe", "Qwen2Moe", "Qwen3_5MoeText", "Qwen4ExpText", "SolarOpen",
    "Zaya",
)  # fmt: skip


def tiny(name: str) -> PreTrainedModel:
    kind = getattr(transformers, f"{name}Config")
    usual = kind()
    sizes = {key: value for key, value in SIZES.items() if getattr(usual, key, None) is not None}
    torch.manual_seed(0)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[kind](kind(**(sizes | MORE.get(name, {}))))
    return model


def shapes(decoder: HFDecoder) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in decoder.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", [name for name in CLASSES if hasattr(transformers, f"{name}Config")])
def test_it_builds_steps_and_keeps_documents_apart(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path)
    base = read_base(tmp_path)
    settings: dict[str, Any] = {"rank": 2, "attention_rank": 3, "alpha": 4.0, "modules": ("experts", "attention")}
    settings |= {"storage": "dense", "linear": "dense"}
    generator = torch.Generator().manual_seed(0)
    settings |= {"dtype": torch.float32, "device": CPU, "generator": generator}
    decoder = load_decoder(base, **settings, home=CPU)
    assert shapes(decoder) == shapes(load_decoder(base, **settings, home=torch.device("meta")))
    ids = torch.randint(3, 256, (1, 2 * LENGTH), generator=generator)
    out = decoder(ids, labels=ids)
    assert out.loss is not None
    assert (out.tokens_per_expert.sum(1) == ids.numel() * out.tokens_per_expert.sum(1)[0] // ids.numel()).all()
    out.loss.backward()
    trained = {n for n, p in decoder.named_parameters() if p.grad is not None and ".experts." in n and p.grad.any()}
    assert {n for n in shapes(decoder) if ".experts." in n and ".lora_B." in n} <= trained
    decoder.eval()
    assert (decoder.documents_by == "rows") == mixes_documents(base)
    if decoder.documents_by == "rows":
        return
    documents = Documents.of(torch.arange(LENGTH).repeat(1, 2))
    with torch.no_grad():
        packed = decoder(ids, documents=documents).logits
        alone = torch.cat([decoder(each).logits for each in ids.split(LENGTH, 1)], 1)
    assert relative_error(packed, alone) < 1e-4
