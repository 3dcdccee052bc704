"""The portable backend in Triton, for any GPU that Triton compiles for; TMA where the GPU has it."""
