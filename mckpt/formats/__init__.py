"""The disk formats: which stored tensor holds which box, and the files of a new checkpoint."""
