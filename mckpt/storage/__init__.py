"""Where bytes live: local files."""
