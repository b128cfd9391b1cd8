"""mckpt moves LLM checkpoints between Hugging Face and Megatron and proves the result."""
