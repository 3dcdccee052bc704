"""The expert GEMMs F1 to B5 and their helpers, by backend."""
