"""HTML pages that need nothing beside them: their elements, and the pictures of a checkpoint."""
