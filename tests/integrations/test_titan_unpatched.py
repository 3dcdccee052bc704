"""Importing the integrations, and a register with its unregister, leave the other packages as they were."""

from __future__ import annotations

from helpers import run_python

CODE = """
import inspect, sys
import peft, transformers, trl
import torchtitan.overrides.fused_swiglu
from transformers import Trainer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.models.mixtral import modeling_mixtral
from transformers.models.gpt_oss import modeling_gpt_oss
from trl import SFTTrainer

OTHERS = ("transformers", "torchtitan", "peft", "trl", "accelerate")

def is_code(value):
    kinds = (type, staticmethod, classmethod, property)
    return isinstance(value, kinds) or inspect.isroutine(value)

def code():
    '''Every function and class of the other packages' modules, and every member of their classes, by where it is.'''
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in OTHERS:
            continue
        for attribute, value in list(vars(module).items()):
            if not is_code(value):
                continue
            found[name, attribute] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] in OTHERS:
                found |= {(name, attribute, member): own for member, own in vars(value).items() if is_code(own)}
    return found

def tables():
    return [dict(table) for table in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)]

def changed():
    now = code()
    return [where for where, was in before.items() if now.get(where) is not was]

before, tables_before = code(), tables()
assert len(before) > 20_000, len(before)
import tilemoe
import tilemoe.integrations.peft, tilemoe.integrations.replay, tilemoe.integrations.torchtitan
from tilemoe.integrations import transformers as integration
assert not changed(), f"importing changed {changed()}"
assert tables() == tables_before, "importing changed a table"
integration.register()
assert tables() != tables_before
integration.unregister()
assert not changed(), f"registering changed {changed()}"
assert tables() == tables_before
print(len(before))
"""


def test_nothing_of_another_package_is_replaced() -> None:
    run_python(CODE)
