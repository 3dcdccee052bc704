"""On a GPU: transformers' models and adapters over the kernels that are chosen there."""

import pytest
import torch
from hf_models import FAMILIES, tokens

from tilemoe.integrations import transformers as integration
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("registered")]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_errs_no_more_than_eager(family: str) -> None:
    """hidden_size 32 and expert widths 24 and 16: multiples of 8, which the Triton kernels take."""
    model = FAMILIES[family].make().train()
    ids = tokens()
    exact = model(input_ids=ids).logits.detach()
    model.to("cuda", torch.bfloat16)
    errors = {}
    for implementation in ("eager", "tilemoe"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        out = model(input_ids=ids.cuda(), labels=ids.cuda())
        out.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        errors[implementation] = relative_error(out.logits.detach().float().cpu(), exact)
    assert errors["tilemoe"] < 2 * errors["eager"]


def test_generate_in_bf16_calls_nothing_else() -> None:
    model = FAMILIES["qwen3_moe"].make().to("cuda", torch.bfloat16)
    integration.use(model)
    out = model.generate(tokens(batch=1).cuda(), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert out.shape[1] == tokens().shape[1] + 8
    assert model.config._experts_implementation == "tilemoe"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_one_call_for_inference_gives_what_the_operators_give(family: str, count: int) -> None:
    """To the last bit: run, recorded and repeated. With gradients on, though of nothing, operators are called."""
    model = FAMILIES[family].make().to("cuda", torch.bfloat16).requires_grad_(False)
    ((_, module), *_) = integration.experts_modules(model)
    experts = module.get_parameter("down_proj").shape[0]
    width: int = model.config.hidden_size
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(count, width, device="cuda", dtype=torch.bfloat16)
        scores, ids = torch.rand(count, experts, device="cuda").topk(2)
        expected = integration.experts_forward(module, x, ids, scores)
        with torch.no_grad():
            found = integration.experts_forward(module, x, ids, scores)
        assert expected.any()
        assert torch.equal(found, expected), f"call {seed}"


@pytest.mark.parametrize("rank", [8, 16, 64])
def test_adapters_err_little_more_than_merged_weights(rank: int) -> None:
    torch.manual_seed(0)
    tokens_, d, n, experts, k = 512, 256, 128, 8, 2
    plan = plan_topk(torch.rand(tokens_, experts, device="cuda").topk(k).indices, experts)
    shapes = ((experts, rank, d), (experts, 2 * n, rank), (experts, rank, n), (experts, d, rank))
    wide = {
        "x": torch.randn(tokens_, d), "scores": torch.rand(tokens_, k),
        "w1": torch.randn(experts, 2 * n, d) * d**-0.5, "w2": torch.randn(experts, d, n) * n**-0.5,
        **{name: 0.2 * torch.randn(shape) for name, shape in zip(("ua", "ub", "da", "db"), shapes, strict=True)},
    }  # fmt: skip

    def run(dtype: torch.dtype, *, fused: bool) -> list[torch.Tensor]:
        at = {name: t.cuda().to(dtype) for name, t in wide.items()}
        wanted = [at[name].requires_grad_() for name in ("x", "scores", "ua", "ub", "da", "db")]
        if fused:
            ua, ub, da, db = wanted[2:]
            adapters = Adapters(ua, ub, da, db, 0.5)
            o = moe_lora(at["x"], at["w1"], at["w2"], plan, at["scores"], adapters)
        else:
            w1, w2 = at["w1"] + 0.5 * at["ub"] @ at["ua"], at["w2"] + 0.5 * at["db"] @ at["da"]
            o = moe(at["x"], w1, w2, plan, at["scores"])
        do = torch.linspace(-1, 1.5, o.numel(), device="cuda").view_as(o).to(dtype)
        return [o.detach(), *torch.autograd.grad(o, wanted, do)]

    exact, merged = run(torch.float64, fused=False), run(torch.bfloat16, fused=False)
    for ours, plain, true in zip(run(torch.bfloat16, fused=True), merged, exact, strict=True):
        assert relative_error(ours, true) < 2 * relative_error(plain, true)
