"""The eight kernels of the layer, in as many implementations (KernelSets) as there are kinds of device."""
