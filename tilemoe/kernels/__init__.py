"""The eight kernels of the layer, in as many implementations (backends) as there are kinds of device."""
