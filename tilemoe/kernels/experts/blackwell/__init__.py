"""The Blackwell backend: Gluon kernels for compute capability 10.0. Compiled and emulated; never run."""
