"""The formats of operands by Triton kernels: what quantises them, and what a mainloop loads."""
