"""The engine: requests in, tokens out, over one model on one device."""
