"""A decoder language model, and the dimensions of public architectures. Importing this imports no torch."""
