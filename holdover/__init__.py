"""Holdover: inference for agents that never computes, stores or sends the same part of a history twice."""

__version__ = "0.1.0"
