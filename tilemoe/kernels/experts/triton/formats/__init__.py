"""The formats of operands in Triton: the kernels that quantise them, and the loads that a mainloop calls."""
