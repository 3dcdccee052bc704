"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state of theirs.

Steps count from 0; step ``s`` is the one that turns ``s`` finished steps into ``s + 1``.
"""

from __future__ import annotations

import math

from tilemoe.train.config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of optimiser step ``step`` of ``steps``.

    Linear warm-up over ``warmup_steps`` (the first step already learns), then ``config.schedule``:

    * ``cosine``: half a cosine from 1 down to ``min_lr_ratio``, reached at the last step;
    * ``wsd``: constant, then over the last ``decay_fraction`` of all steps ``1 - sqrt(progress)`` down to
      ``min_lr_ratio`` (warm-up, stable, decay; Hägele et al. 2024, arXiv 2405.18392);
    * ``constant``: stays at the peak.
    """
    assert 0 <= step < steps, (step, steps)
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    factor = _decay(step, steps, config)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


def _decay(step: int, steps: int, config: OptimConfig) -> float:
    """From 1 (peak) to 0 (``min_lr_ratio``) for a step after the warm-up."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        span = steps - 1 - config.warmup_steps
        return 0.5 * (1.0 + math.cos(math.pi * (step - config.warmup_steps) / span)) if span > 0 else 1.0
    decay_steps = min(round(config.decay_fraction * steps), steps - config.warmup_steps)
    done = step - (steps - decay_steps) + 1
    return 1.0 - math.sqrt(done / decay_steps) if done > 0 else 1.0
