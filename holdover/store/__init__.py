"""Tiers, and the queues that save into and load from them on their own threads."""
