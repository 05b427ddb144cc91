"""Classes of work: which one an operator or kernel belongs to (`operators`), and where a step's time goes (`hotspots`)."""
