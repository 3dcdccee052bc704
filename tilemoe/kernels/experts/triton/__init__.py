"""The backend in Triton: any GPU that Triton compiles for, with TMA where the GPU has it."""
