"""advisor.engines."""
