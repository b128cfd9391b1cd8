"""Low-rank adapters (LoRA): those of PEFT and of Megatron, and weights with an adapter."""
