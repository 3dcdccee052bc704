"""The recipes of published sizes: what their models count and cost, and that they can be built."""

import pytest

from tilemoe.models.decoder import DecoderLM
from tilemoe.models.flops import count_active_parameters, count_parameters, flops_per_token
from tilemoe.train.config import load_recipe


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("1b", 1.40e9, 0.27e9),
        ("7b", 6.73e9, 1.07e9),
        ("7b-ep", 6.73e9, 1.07e9),
        ("30b-layer", 0.876e9, 0.1206e9),
        ("cpu-4", 157_120, 83_392),
    ],
)
def test_parameters(name: str, total: float, active: float) -> None:
    config = load_recipe(name).model
    model = DecoderLM(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config) == pytest.approx(total, rel=0.005)
    assert count_active_parameters(config) == pytest.approx(active, rel=0.005)


def test_the_7b_recipe_is_the_papers_run() -> None:
    """38,520 tokens/s of an H100 (989 TFLOP/s) are 27.3% of it, and a micro-batch is the benchmarks' 24,576 tokens."""
    recipe = load_recipe("7b")
    assert flops_per_token(recipe.model, recipe.data.seq_len) * 38_520 / 989e12 == pytest.approx(0.273, abs=5e-4)
    assert recipe.data.batch_size * recipe.data.seq_len == 24_576


def test_the_30b_layer_is_the_papers() -> None:
    """Its experts, tokens and layer are the benchmarks' 30B-n256, and next to nothing else is computed."""
    recipe = load_recipe("30b-layer")
    moe = recipe.model.moe
    assert moe is not None
    sizes = (moe.hidden_size, moe.intermediate_size, moe.num_experts, moe.num_experts_per_tok)
    assert sizes == (4096, 256, 256, 16)
    assert recipe.data.batch_size * recipe.data.seq_len == 32_768
    head = 6 * recipe.model.vocab_size * recipe.model.hidden_size
    assert head < 0.01 * flops_per_token(recipe.model, recipe.data.seq_len)
    assert recipe.parallel_for(1).shard == 1


@pytest.mark.parametrize("name", ["1b", "7b", "7b-ep", "30b-layer"])
@pytest.mark.parametrize("processes", [4, 8, 64])
def test_they_fit_jobs_of_many_sizes(name: str, processes: int) -> None:
    sizes = load_recipe(name).parallel_for(processes)
    assert sizes.replicate * sizes.shard * sizes.expert == processes


@pytest.mark.parametrize("name", ["single-gpu", "1b", "7b", "7b-ep", "30b-layer"])
def test_those_for_gpus_compile_their_blocks(name: str) -> None:
    assert load_recipe(name).train.compile == "blocks"


def test_one_process_cannot_divide_experts() -> None:
    with pytest.raises(ValueError, match=r"expert 4 needs 4 processes and the job has 1; start it with torchrun"):
        load_recipe("7b-ep").parallel_for(1)
