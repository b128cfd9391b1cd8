"""Where bytes are stored: local files, the Hugging Face Hub, object stores."""
