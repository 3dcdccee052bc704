"""The processes of a job: where they meet, what they tell each other, how they end."""
