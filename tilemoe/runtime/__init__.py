"""How operators are registered, launched, traced and replayed. Nothing here depends on mixtures of experts."""
