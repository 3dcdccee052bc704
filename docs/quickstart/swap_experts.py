"""Let tilemoe compute the experts of a transformers model: python swap_experts.py FOLDER_OR_NAME"""

import sys

import torch
from transformers import AutoModelForCausalLM

from tilemoe.integrations import transformers as tilemoe_transformers

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.randint(model.config.vocab_size, (2, 64))
before = model(input_ids=ids, labels=ids).loss
layers = tilemoe_transformers.use(model)
after = model(input_ids=ids, labels=ids).loss
after.backward()
print(
    f"{layers} MoE layers: loss {after.item():.4f} nats/token, {abs(after - before).item():.0e} from transformers' own"
)
