"""From a source to a published checkpoint."""
