"""advisor.classify."""
