"""A run's checkpoints on disk: written completely or not at all, by one process or by all processes of a job."""
