"""Training: recipes, schedules, the optimiser, the loop, checkpoints, metrics and plots."""
