"""Kernels, each a function of tensors: attention, delta rules, experts, products, norms, rotary positions."""
