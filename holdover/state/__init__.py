"""State: layout, addresses, the device pool, the prefix tree, segments and policy. No torch.nn, no I/O, no threads."""
