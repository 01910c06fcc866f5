"""From chat messages to prompt text, and from output tokens back to text that a client may see."""
