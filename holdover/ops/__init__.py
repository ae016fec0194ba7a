"""Kernels, each a function of tensors: attention, delta rules, convolution, mixture of experts, norms, rotary positions."""
