"""The demo: real agent traffic through the real server, in four modes, side by side."""
