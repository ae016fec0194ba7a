"""The HTTP server: OpenAI's completions and chat, models, health and metrics, in front of an engine process."""
