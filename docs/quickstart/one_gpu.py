"""Fine-tune a mixture of experts with its weights in 4 bit: python one_gpu.py FOLDER_OR_NAME CHATS.jsonl"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available
from trl import SFTConfig, SFTTrainer

from tilemoe.integrations.quantized import TilemoeConfig

base, chats = sys.argv[1:]
attention = None  # as it is, unless bitsandbytes is installed
if is_bitsandbytes_available():
    attention = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(
    base,
    dtype=torch.bfloat16,
    device_map={"": device},
    quantization_config=TilemoeConfig("nf4", linear=attention),
)
adapters = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
)
settings = SFTConfig(
    output_dir="runs/adapters",
    max_steps=10,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    max_length=2048,
    learning_rate=2e-4,
    bf16=device == "cuda",
    report_to="none",
)
trainer = SFTTrainer(
    model,
    settings,
    train_dataset=load_dataset("json", data_files=chats, split="train"),
    processing_class=AutoTokenizer.from_pretrained(base),
    peft_config=adapters,
)
trainer.train()
trainer.save_model()
print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f} nats/token over {trainer.state.global_step} steps")
