"""How operators are registered, launched, traced and repeated. Knows nothing of mixtures of experts."""
