"""Models: one file per architecture. Each reads and writes its state through slots and live rows."""
