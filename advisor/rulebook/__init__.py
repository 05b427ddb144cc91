"""advisor.rulebook."""
