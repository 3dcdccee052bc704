"""A model on many processes: meshes, FSDP2 and expert parallelism, by PyTorch's own engines."""
