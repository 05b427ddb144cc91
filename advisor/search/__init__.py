"""advisor.search."""
