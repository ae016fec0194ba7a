"""Traffic: recorded agent sessions, read, replayed against any server, and reported."""
