"""The checkpoint formats: one module each, with what is stored where (`layout`), how to read it and how to write it."""
