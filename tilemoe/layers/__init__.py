"""The building blocks as ``torch.nn`` modules: norms, attention, MLPs, router, experts, and the MoE layer."""
