"""weightferry carries a LoRA policy from an FSDP trainer to a live vLLM server, through files."""
