"""advisor.measure."""
