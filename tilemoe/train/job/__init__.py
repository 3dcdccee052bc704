"""The processes of a job: how they start, what they exchange, and how they end."""
