"""The value of one element: dtypes, casts, quantised blocks."""
